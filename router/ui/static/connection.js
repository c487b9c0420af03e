// Shows whether the figures are live. Without a connection the dashboard is grey, with a banner.
import { $, ago, clockTime, setText } from "./dom.js";

export class Connection {
  constructor(state) {
    this.state = state;
    this.lostAt = 0; // Unix time of this computer's clock, in seconds; 0: live
    this.why = "";
    this.isRefusal = false;
  }

  showLive() {
    if (this.state.isLive && $("link").className === "live") return;
    const wasLost = this.state.hasSnapshot && this.lostAt;
    this.state.isLive = true;
    this.lostAt = 0;
    document.body.classList.remove("is-lost", "is-connecting");
    $("lost").hidden = true;
    if (this.state.isStopping) {
      this.showStopping();
    } else {
      $("link").className = "live";
      setText($("link"), "live");
    }
    if (wasLost) setText($("announce"), "The connection to the router is back.");
  }

  showStopping() {
    $("link").className = "";
    setText($("link"), "shutting down");
  }

  // `isRefusal`: the router answers, but sends no figures.
  showLost(why, isRefusal) {
    this.why = why;
    this.isRefusal = isRefusal;
    if (this.state.isLive || !this.lostAt) {
      this.state.freeze();
      this.lostAt = Date.now() / 1000;
    }
    document.body.classList.remove("is-connecting");
    document.body.classList.add("is-lost");
    $("link").className = "lost";
    setText($("link"), "disconnected, reconnecting");
    this.showTime();
    $("lost").hidden = false;
    document.title = "(disconnected) disagg-router";
  }

  showTime() {
    if (!this.lostAt) return;
    const { hasSnapshot, isStopping } = this.state;
    const title = this.isRefusal ? "The router sends no figures" : isStopping ? "The router has shut down" : hasSnapshot ? "No connection to the router" : "The router cannot be reached";
    setText($("lost-title"), title);
    const since = `since ${clockTime(this.lostAt)} (${ago(Date.now() / 1000 - this.lostAt)}): ${this.why}.`;
    setText($("lost-text"), hasSnapshot ? `${since} The figures below are from before.` : since);
  }
}
