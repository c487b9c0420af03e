// Helpers to create and change elements, and to write numbers with their units. Text is never markup.
const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.getAttribute("class") !== name) element.setAttribute("class", name);
}

// Updates a list in place: `items` are pairs of a key and a value, `create` makes an element for a key.
export function keep(list, known, items, create, update) {
  const keys = new Set(items.map(([key]) => key));
  for (const [key, element] of known) {
    if (keys.has(key)) continue;
    element.remove();
    known.delete(key);
  }
  let before = list.firstElementChild;
  for (const [key, value] of items) {
    let element = known.get(key);
    if (!element) known.set(key, (element = create(key)));
    update(element, value);
    if (element === before) before = before.nextElementSibling;
    else list.insertBefore(element, before);
  }
}

export const count = (number) => number.toLocaleString("en-US");

// A number for little room: 12.3 M.
export const compact = (number) => (number < 1e6 ? count(number) : number < 1e9 ? `${(number / 1e6).toFixed(1)} M` : `${(number / 1e9).toFixed(1)} G`);

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function duration(ms) {
  if (ms === null || ms === undefined) return "";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  return ms < 60000 ? `${(ms / 1000).toFixed(2)} s` : `${(ms / 60000).toFixed(1)} min`;
}

// A time span in seconds, coarsely.
export function ago(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  for (; number >= 999.5 && step < units.length - 1; step++) number /= 1000;
  return `${number >= 99.5 || step === 0 ? Math.round(number) : number.toFixed(1)} ${units[step]}`;
}

export const perSecond = (rate, unit = "") => `${rate < 10 ? rate.toFixed(1) : count(Math.round(rate))}${unit && ` ${unit}`}/s`;

export const percent = (share) => `${Math.round(share * 100)} %`;

export const clockTime = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });

// A time of the last 24 hours without its date.
export function moment(unix, now) {
  const date = new Date(unix * 1000);
  return now - unix < 86400 ? clockTime(unix) : `${date.toLocaleDateString()} ${clockTime(unix)}`;
}
