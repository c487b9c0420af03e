// Helpers to create and change elements. Text is always text, never markup.
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

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

export function duration(ms) {
  if (ms === null || ms === undefined) return "";
  if (ms < 1) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 60000 ? `${(ms / 1000).toFixed(2)} s` : `${(ms / 60000).toFixed(1)} min`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  for (; count >= 1000 && step < units.length - 1; step++) count /= 1000;
  return `${count >= 100 || step === 0 ? Math.round(count) : count.toFixed(1)} ${units[step]}`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

export const clockTime = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
