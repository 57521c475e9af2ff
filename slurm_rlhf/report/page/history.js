"use strict";
// Starts, stops, requeues, hangs and warnings on the time axis.

const SHAPES = { start: "M-5-5L6 0L-5 5Z", resume: "M-5-5L6 0L-5 5Z", checkpoint: "M0-4L4 0L0 4L-4 0Z", finish: "M-5-5H5V5H-5Z", requeue: "M0-7L6 5H-6Z", restart: "M0-7L6 5H-6Z" };
const CROSS = "M-5-7L0-2L5-7L7-5L2 0L7 5L5 7L0 2L-5 7L-7 5L-2 0L-7-5Z";
const ROUND = "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0-5 0Z";

const shape = (kind) => SHAPES[kind] || (kind === "engine lost" || kind === "error" || kind === "hang" || kind === "stop" ? CROSS : ROUND);

function historyPlot(run) {
  const title = COMPARES ? `${run.name}: time axis` : "Time axis";
  const host = el("div", { class: "plot", "data-plot": title });
  const times = [...run.events.map((event) => event.at), ...run.sessions.flatMap((each) => [each.begin, each.end])];
  const [from, to] = extent(times);
  const lanes = ["start", "resume", "checkpoint", "warning", "engine lost", "engine joined", "hang", "error", "restart", "stop", "requeue", "finish"].filter((kind) => run.events.some((event) => event.event === kind));
  const draw = drawn(host, (width) => {
    const unit = rem();
    const left = 5.8 * unit;
    const x = (at) => left + ((at - from) / (to - from || 1)) * (width - left - 1.2 * unit);
    const lane = (index) => (2.6 + index * 1.4) * unit;
    const height = lane(lanes.length) + 0.8 * unit;
    const bars = run.sessions.map((each) => svg("rect", {
      class: "mark", x: x(each.begin), y: 0.6 * unit, width: Math.max(2, x(each.end) - x(each.begin)), height: 0.9 * unit, rx: 3, fill: "var(--c0)",
      "fill-opacity": 0.55, ...tipped(`steps ${each.first} to ${each.last}, ${seconds(each.end - each.begin)}, ${each.how}`),
    }));
    const rows = lanes.map((kind, index) => [
      svg("line", { class: "gridline", x1: left, x2: width - 0.6 * unit, y1: lane(index), y2: lane(index) }),
      svg("text", { class: "strong", x: left - 10, y: lane(index) + 4, "text-anchor": "end" }, kind),
      run.events.filter((event) => event.event === kind).map((event) => svg("path", {
        class: "mark event-mark", "data-event": kind, d: shape(kind), transform: `translate(${x(event.at).toFixed(1)} ${lane(index)})`, fill: eventColour(kind),
        ...tipped(el("b", {}, `${kind}, step ${event.step}`), moment(event.at), event.text),
      })),
    ]);
    const marks = timeTicks(to - from, Math.max(2, Math.floor(width / (8 * unit)))).map((at) => svg("text", { x: x(from + at), y: height - 5, "text-anchor": "middle" }, seconds(at)));
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title },
      svg("text", { class: "strong", x: left - 10, y: 1.3 * unit, "text-anchor": "end" }, "sessions"), bars, rows, marks);
  });
  queueMicrotask(draw);
  return el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, title), el("span", { class: "soft small" }, `since ${moment(from)}`)), host);
}

function eventsTable(run) {
  const kinds = [...new Set(run.events.map((event) => event.event))];
  const body = el("tbody");
  const fill = (kind) => body.replaceChildren(...run.events.filter((event) => !kind || event.event === kind).slice(-200).reverse().map((event) =>
    el("tr", { "data-event": event.event }, el("td", { class: "tight" }, moment(event.at)), el("td", { class: "tight" }, String(event.step)), el("td", { class: "tight" }, key(eventColour(event.event), event.event)), el("td", {}, event.text))));
  fill("");
  const chooser = el("select", { "aria-label": "kind of event", onchange: (event) => fill(event.target.value) }, el("option", { value: "" }, "all events"), kinds.map((kind) => el("option", { value: kind }, kind)));
  return el("div", { class: "card", style: "margin-top:0.7rem" }, el("div", { class: "row" }, chooser),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["time", "step", "event", "text"].map((name) => el("th", { class: "tight" }, name)))), body)));
}

function historySection() {
  const parts = RUNS.filter((run) => run.events.length).flatMap((run) => [historyPlot(run), eventsTable(run)]);
  return section("history", "What happened when", "Each start of the run is a session; a requeued run goes on in the next one.", parts.length ? parts : empty("The events of this run were not recorded."));
}
