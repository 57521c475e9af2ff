"use strict";
// Where the time of a step goes: the conductor's phases over the steps, and what the ranks of each role did.

function stackedPlot(title, times) {
  const names = Object.keys(times.phases).filter((name) => times.phases[name].some((value) => value > 0));
  const totals = times.steps.map((_, index) => names.reduce((sum, name) => sum + times.phases[name][index], 0));
  const plot = { title, steps: true, zero: true, series: [{ name: "step", x: times.steps, y: totals }] };
  const host = el("div", { class: "plot", "data-plot": title });
  const draw = drawn(host, (width) => {
    const height = Math.max(190, Math.min(320, width * 0.42));
    const scale = scales(plot, width, height);
    const edges = stepEdges(times.steps, scale, width);
    const below = totals.map(() => 0);
    const areas = names.map((name) => stackedArea(times.phases[name], below, edges, scale, workColour(name)));
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title }, axes(scale, width, height, seconds), areas);
    crosshair(picture, scale, height, (at) => stackLines(names, times, at), times.steps);
    return picture;
  });
  queueMicrotask(draw);
  return el("figure", { class: "card" }, el("h3", {}, title), host, legend(byColour(names)));
}

// Pixels at which the column of each step, or of a group of steps, begins and ends.
function stepEdges(steps, scale, width) {
  const middle = steps.map((step) => scale.x(step));
  return middle.map((at, index) => [
    index ? (middle[index - 1] + at) / 2 : scale.margin.left,
    index < middle.length - 1 ? (middle[index + 1] + at) / 2 : width - scale.margin.right,
  ]);
}

function stackedArea(values, below, edges, scale, fill) {
  const top = [];
  const bottom = [];
  values.forEach((value, index) => {
    const [left, right] = edges[index];
    bottom.push([left, scale.y(below[index])], [right, scale.y(below[index])]);
    below[index] += value;
    top.push([left, scale.y(below[index])], [right, scale.y(below[index])]);
  });
  const text = [...top, ...bottom.reverse()].map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return svg("path", { class: "mark area", d: text + "Z", fill });
}

function stackLines(names, times, at) {
  const index = times.steps.indexOf(at);
  const lines = names.map((name) => [name, times.phases[name][index]]).filter((pair) => pair[1] > 0).sort((a, b) => b[1] - a[1]);
  return [el("b", {}, `step ${at}: ${seconds(times.seconds[index])}`), ...lines.map(([name, value]) => key(workColour(name), `${name} ${seconds(value)}`))];
}

function roleBars(title, roles) {
  const host = el("div", { class: "plot", "data-plot": title });
  const rows = Object.entries(roles);
  const longest = Math.max(...rows.map(([, calls]) => Object.values(calls).reduce((sum, value) => sum + value, 0)));
  const draw = drawn(host, (width) => {
    const unit = rem();
    const left = 5.6 * unit;
    const height = (rows.length * 2.1 + 1.6) * unit;
    const x = (value) => left + (value / (longest || 1)) * (width - left - unit);
    const bars = rows.map(([role, calls], row) => roleBar(role, calls, (row * 2.1 + 0.2) * unit, 1.6 * unit, x));
    const marks = ticks(0, longest, 4).map((at) => svg("text", { x: x(at), y: height - 4, "text-anchor": "middle" }, seconds(at)));
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title }, bars, marks);
  });
  queueMicrotask(draw);
  const names = [...new Set(rows.flatMap(([, calls]) => Object.keys(calls)))].sort((a, b) => (a === "waits") - (b === "waits"));
  return el("figure", { class: "card" }, el("h3", {}, title), host, legend(byColour(names)));
}

function roleBar(role, calls, top, height, x) {
  let sum = 0;
  const parts = Object.entries(calls).sort((a, b) => (a[0] === "waits") - (b[0] === "waits")).map(([name, value]) => {
    const start = x(sum);
    sum += value;
    return svg("rect", { class: "mark", x: start, y: top, width: Math.max(0.5, x(sum) - start), height, fill: workColour(name), ...tipped(`${role}: ${name} ${seconds(value)}`) });
  });
  return [svg("text", { class: "strong", x: x(0) - 8, y: top + height * 0.68, "text-anchor": "end" }, role), parts];
}

function timesSection() {
  const about = stagesOnly() ? null : "Phases of the conductor: each second counts for one of them. By role: mean over the ranks and the last steps; what a rank waits for inside a call counts as work.";
  const parts = RUNS.flatMap((run) => {
    const name = COMPARES ? `${run.name}: ` : "";
    const found = [];
    if (run.times.steps.length) found.push(stackedPlot(`${name}seconds of each step, by phase`, run.times));
    const phases = Object.entries(run.summary.phases || {});
    const pair = ([phase, each]) => `${phase} ${each.predicted === null ? "not predicted" : seconds(each.predicted)} / ${seconds(each.measured)}`;
    if (phases.length) found.push(el("p", {}, `${name}predicted / measured seconds of a step: ${phases.map(pair).join(", ")}`));
    if (Object.keys(run.role_times).length) found.push(roleBars(`${name}seconds of a step, by role`, run.role_times));
    return found;
  });
  return section("times", "Where the time goes", about, parts.length ? el("div", { class: "wide" }, parts) : empty("No step is done yet."));
}
