"use strict";
// Who computed and who waited in the last steps: a row for each rank.

function timelineCard(run) {
  const { rows, steps, names } = run.timeline;
  const title = COMPARES ? `${run.name}: the last steps` : "The last steps";
  let count = Math.min(2, steps.length);
  const host = el("div", { class: "plot", "data-plot": title });
  const draw = drawn(host, (width) => gantt(rows, steps.slice(-count), names, width));
  const counts = [...new Set([1, 2, 4, steps.length])].filter((each) => each <= steps.length).sort((a, b) => a - b);
  const buttons = counts.map((each) => el("button", {
    "aria-pressed": String(each === count),
    onclick: (event) => {
      count = each;
      for (const button of event.target.parentNode.children) button.setAttribute("aria-pressed", String(button === event.target));
      draw();
    },
  }, each === 1 ? "1 step" : `${each} steps`));
  queueMicrotask(draw);
  const left = run.timeline.left_out > 0 ? `${run.timeline.left_out} more ranks are in timeline.jsonl.` : "";
  return el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, title), el("div", { class: "row" }, buttons)),
    el("div", { class: "scroll" }, host), legend([...byColour(names), ["waits", "var(--track)"]]),
    el("p", { class: "soft small" }, left));
}

function gantt(rows, steps, names, width) {
  const unit = rem();
  const left = 7.2 * unit;
  const rowHeight = Math.max(0.9, Math.min(1.7, 40 / rows.length)) * unit;
  const top = 1.5 * unit;
  const bottom = top + rows.length * rowHeight;
  const height = bottom + 1.5 * unit;
  const first = steps[0].began;
  const last = steps[steps.length - 1];
  const whole = last.began + last.seconds - first || 1;
  const x = (at) => left + (at / whole) * (width - left - 0.6 * unit);
  const tracks = rows.map((row, index) => [
    svg("rect", { x: left, y: top + index * rowHeight + 1, width: width - left - 0.6 * unit, height: rowHeight - 2, fill: "var(--track)" }),
    svg("rect", { x: left - 0.5 * unit, y: top + index * rowHeight + 1, width: 0.3 * unit, height: rowHeight - 2, fill: roleColour(row.role) }),
    svg("text", { class: "strong", x: left - 0.8 * unit, y: top + (index + 0.5) * rowHeight + 4, "text-anchor": "end", ...tipped(row.node || "the conductor") },
      row.role === "conductor" ? row.role : `${row.role} ${row.rank}`),
  ]);
  const spans = steps.flatMap((step) => step.spans.map(([row, name, begin, end]) => {
    const from = x(step.began - first + begin);
    const text = `${rows[row].role} ${rows[row].rank}: ${names[name]}, ${seconds(end - begin)} (step ${step.step})`;
    return svg("rect", { class: "mark", x: from, y: top + row * rowHeight + 1, width: Math.max(0.6, x(step.began - first + end) - from), height: rowHeight - 2, fill: workColour(names[name]), ...tipped(text) });
  }));
  const borders = steps.map((step) => [
    svg("line", { class: "gridline", x1: x(step.began - first), x2: x(step.began - first), y1: 0, y2: bottom }),
    svg("text", { x: x(step.began - first) + 4, y: unit }, `step ${step.step}`),
  ]);
  const marks = timeTicks(whole, Math.max(2, Math.floor(width / (7 * unit)))).map((at) => svg("text", { x: x(at), y: height - 5, "text-anchor": "middle" }, seconds(at)));
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "calls of each rank over time" }, tracks, spans, borders, marks);
}

function timelineSection() {
  const cards = RUNS.filter((run) => run.timeline.steps.length).map(timelineCard);
  return section("timeline", "Who computes, who waits", "A bar: a call to the rank is in progress. The empty track: it waits for others.",
    cards.length ? el("div", {}, cards) : empty("The calls of this run were not recorded."));
}
