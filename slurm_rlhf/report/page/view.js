"use strict";
// What the curves are looked at through: the x axis, how much they are smoothed, and the part that is zoomed to.

const VIEW = { axis: "steps", smooth: 0, range: null };
// Name in the curves of a run -> [in words, a number on the axis, its marks].
const AXES = {
  steps: ["steps", (at) => `step ${number(at)}`, String],
  tokens: ["response tokens", (at) => `${number(at)} tokens`, number],
  seconds: ["time of the steps", seconds, seconds],
};

const missing = (value) => value === null || value === undefined;

// The place of a step on the x axis: between two steps whose places are known, in proportion.
function along(run, step) {
  const { steps } = run.curves;
  const places = run.curves[VIEW.axis];
  if (VIEW.axis === "steps" || !places.length) return step;
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  const [from, begin] = low ? [steps[low - 1], places[low - 1]] : [0, 0];
  return begin + (places[low] - begin) * Math.min(1, Math.max(0, (step - from) / (steps[low] - from || 1)));
}

// The exponential mean of the values so far; the first ones count as much as if nothing had been before them.
function smoothed(values) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (missing(value)) return value;
    sum = VIEW.smooth * sum + (1 - VIEW.smooth) * value;
    weight = VIEW.smooth * weight + 1 - VIEW.smooth;
    return sum / weight;
  });
}

// A plot over steps as it is seen: with `at`, the places of its points, and the raw line behind the smoothed one.
function viewed(plot) {
  const series = plot.series.flatMap((each) => {
    const at = each.x.map((step) => each.runs.reduce((sum, run) => sum + along(run, step), 0) / each.runs.length);
    if (!VIEW.smooth || plot.exact) return [{ ...each, at }];
    const soft = { ...each, at };
    for (const name of ["y", "low", "high", "least", "most"]) if (each[name]) soft[name] = smoothed(each[name]);
    return each.thin ? [soft] : [{ ...soft, name: `${each.name}, smoothed` }, { name: each.name, colour: each.colour, x: each.x, y: each.y, at, thin: true }];
  });
  const events = plot.events.map((event) => ({ ...event, at: along(RUNS[0], event.step) }));
  return { ...plot, series, events, range: VIEW.range };
}

let waits = false;

function look(changes) {
  Object.assign(VIEW, changes);
  document.querySelectorAll("#view [data-whole]").forEach((button) => { button.hidden = !VIEW.range; });
  if (waits) return;
  waits = true; // once a frame, however fast the pointer is
  requestAnimationFrame(() => { waits = false; redraws.forEach((redraw) => redraw()); });
}

// Drag over a part of a plot: all plots over steps show it; a double click shows all of them again.
function zooms(picture, scale, height) {
  let from = null;
  const part = svg("rect", { class: "zoom", y: scale.margin.top, height: height - scale.margin.top - scale.margin.bottom, visibility: "hidden" });
  picture.append(part);
  const place = (event) => Math.min(scale.x(scale.xs[1]), Math.max(scale.x(scale.xs[0]), event.clientX - picture.getBoundingClientRect().left));
  picture.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = place(event);
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const ends = [from, place(event)].sort((a, b) => a - b);
    part.setAttribute("x", ends[0]);
    part.setAttribute("width", ends[1] - ends[0]);
    part.setAttribute("visibility", "visible");
  });
  picture.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [from, place(event)].sort((a, b) => a - b);
    from = null;
    part.setAttribute("visibility", "hidden");
    if (ends[1] - ends[0] > 4) look({ range: ends.map(scale.from) });
  });
  picture.addEventListener("dblclick", () => look({ range: null }));
}

function viewBar() {
  const axes = Object.keys(AXES).filter((name) => name === "steps" || RUNS.every((run) => run.curves[name].length || !run.curves.steps.length));
  const chooser = el("select", { "aria-label": "x axis", onchange: (event) => look({ axis: event.target.value, range: null }) },
    axes.map((name) => el("option", { value: name }, `over ${AXES[name][0]}`)));
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing", oninput: (event) => look({ smooth: Number(event.target.value) }) });
  const whole = el("button", { "data-whole": true, hidden: true, onclick: () => look({ range: null }) }, "whole run");
  return el("div", { id: "view", class: "row small" }, chooser, el("label", { class: "row" }, "smoothing", slider), el("span", { class: "soft" }, "drag over a plot to zoom, double click: all"), whole);
}
