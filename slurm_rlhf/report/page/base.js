"use strict";
// What all sections share: elements, numbers as text, colours, the tip next to the pointer. Texts of users go into
// the page as text nodes only, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COMPARES = RUNS.length > 1;
const redraws = []; // of what depends on the width

function make(space, tag, attributes, children) {
  const node = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const el = (tag, attributes, ...children) => make(false, tag, attributes, children);
const svg = (tag, attributes, ...children) => make(true, tag, attributes, children);

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return shortened(value, 1e6, "M");
  if (size >= 1e4) return shortened(value, 1e3, "k");
  if (size >= 100) return value.toFixed(0);
  if (size >= 0.001) return String(Number(value.toPrecision(4)));
  return value.toExponential(2);
}

const shortened = (value, unit, letter) => Number((value / unit).toPrecision(3)) + " " + letter;

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= unit) return Number((value / unit).toPrecision(3)) + " " + name;
  }
  return value + " B";
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1) return number(value * 1000) + " ms";
  if (value < 90) return Number(value.toPrecision(3)) + " s";
  if (value < 5400) return Number((value / 60).toPrecision(2)) + " min";
  const minutes = Math.round(value / 60);
  return Math.floor(minutes / 60) + " h" + (minutes % 60 ? " " + String(minutes % 60).padStart(2, "0") : "");
}

const percent = (value) => (value === null || value === undefined ? "–" : Number((100 * value).toPrecision(3)) + " %");
const moment = (unix) => new Date(unix * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

const PALETTE = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const ROLES = { actor: "--c0", critic: "--c1", rollout: "--c2", reward: "--c3", reference: "--c5", conductor: "--grey" };
const WORK = {
  rollout: "--c2", generate: "--c2", update: "--c0", train_step: "--c0", forward: "--c3", logprobs: "--c3", reward: "--c1",
  values: "--c1", score: "--c1", ref_logprobs: "--c5", sync: "--c4", sync_push: "--c4", sync_receive: "--c4",
  eval: "--c5", checkpoint: "--c6", save: "--c6", load: "--c6", self_check: "--c7", advantages: "--c7", other: "--grey",
  waits: "--track",
};
const EVENTS = {
  start: "--grey", resume: "--c0", stop: "--warn", requeue: "--c3", restart: "--warn", warning: "--c1", hang: "--bad", error: "--bad",
  checkpoint: "--c6", finish: "--good", "engine lost": "--bad", "engine joined": "--good",
};

const colour = (index) => `var(${PALETTE[index % PALETTE.length]})`;
const roleColour = (role) => `var(${ROLES[role] || "--grey"})`;
const eventColour = (kind) => `var(${EVENTS[kind] || "--grey"})`;

function workColour(name) {
  if (WORK[name]) return `var(${WORK[name]})`;
  let hash = 7;
  for (const char of name) hash = (hash * 31 + char.charCodeAt(0)) % 997;
  return colour(hash);
}

// Phases of the conductor and the calls that they make share a colour, so they share an entry of the legend.
function byColour(names) {
  const found = new Map();
  for (const name of names) found.set(workColour(name), [...(found.get(workColour(name)) || []), name]);
  return [...found].map(([fill, alike]) => [alike.join(", "), fill]);
}

const key = (fill, text) => el("span", {}, el("i", { style: `background:${fill}` }), text);
const legend = (entries) => el("div", { class: "legend" }, entries.map(([text, fill]) => key(fill, text)));

const tip = document.getElementById("tip");

function showTip(event, ...lines) {
  tip.replaceChildren(...lines.flatMap((line, index) => (index ? ["\n", line] : [line])));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
}

const hideTip = () => { tip.hidden = true; };
const tipped = (...lines) => ({ onpointermove: (event) => showTip(event, ...lines), onpointerleave: hideTip });

// Draws into `host` now, and again when the page has another width.
function drawn(host, draw) {
  const again = () => { if (host.isConnected && host.clientWidth) host.replaceChildren(draw(host.clientWidth)); };
  redraws.push(again);
  return again;
}

function section(id, title, about, ...children) {
  return el("section", { id }, el("h2", {}, title), about && el("p", { class: "soft" }, about), ...children);
}

const empty = (text) => el("div", { class: "empty" }, text);
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
