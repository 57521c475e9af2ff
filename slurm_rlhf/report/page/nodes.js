"use strict";
// The nodes and what runs on their accelerators; the weight updates.

function rankBox(rank) {
  const name = rank.engine === null ? `${rank.role} ${rank.rank}` : `engine ${rank.engine}`;
  const speed = rank.tokens_per_s === null ? null : el("span", {}, `${number(rank.tokens_per_s)} tok/s`);
  const full = rank.used === null ? null : el("div", {}, rank.total ? `${bytes(rank.used)} of ${bytes(rank.total)}` : bytes(rank.used));
  const share = rank.used !== null && rank.total ? el("div", { class: "meter" }, el("i", { style: `width:${Math.min(100, (100 * rank.used) / rank.total)}%` })) : null;
  return el("div", { class: "rank mark", style: `--role:${roleColour(rank.role)}`, ...tipped(`${rank.role} rank ${rank.rank}${rank.engine === null ? "" : `, engine ${rank.engine}`}`) }, el("b", {}, name), speed, full, share);
}

function nodesCard(run) {
  const roles = [...new Set(run.nodes.nodes.flatMap((node) => node.slots.flatMap((slot) => slot.map((rank) => rank.role))))];
  const boxes = run.nodes.nodes.map((node) => el("div", { class: "card" }, el("h3", {}, node.name),
    el("div", { class: "slots" }, node.slots.map((slot, index) => el("div", { class: "slot", title: `${run.nodes.unit} ${index}` }, slot.map(rankBox))))));
  return el("div", { "data-plot": COMPARES ? `${run.name}: ranks` : "Ranks" }, COMPARES && el("h3", {}, run.name), el("div", { class: "nodes" }, boxes),
    legend(roles.map((role) => [role, roleColour(role)])), run.nodes.left_out ? el("p", { class: "soft" }, `${run.nodes.left_out} more nodes.`) : null);
}

function nodesSection() {
  const cards = RUNS.filter((run) => run.nodes.nodes.length).map(nodesCard);
  return section("ranks", "Ranks", "Each box is an accelerator, or a slot of a machine without any. Tokens per second: an engine while it had requests; a trainer's rank during updates.",
    cards.length ? cards : empty("The rank map of this run was not recorded."));
}

function syncSection() {
  const tiles = (run) => {
    const sync = run.sync;
    const found = [[bytes(sync.bytes), "bytes of an update"], [seconds(sync.seconds), "to move them"], [sync.rate ? `${bytes(sync.rate)}/s` : "–", "rate"],
      [percent(sync.link_share), "share of the link"], [[sync.backend, sync.interface].filter(Boolean).join(" over ") || "–", "way"]];
    return el("div", { class: "tiles" }, found.map(([value, name]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name))));
  };
  const plots = [["Weight update, seconds", { "time/sync": "whole", "time/sync_transfer": "on their way", "time/sync_checksum": "checksums" }, { format: seconds }], ["Bytes of an update", { "perf/sync_bytes": "bytes" }, { format: bytes }],
    ["Share of the link", { "perf/sync_link_share": "share" }, { format: percent }]].flatMap(([title, names, options]) => plotsOf(title, fitting(names), options));
  return section("sync", "Weights on their way", "From the actor to the engines, after every step; means of the last steps.",
    RUNS.map((run) => el("div", {}, COMPARES && el("h3", {}, run.name), tiles(run))), el("div", { class: "grid", style: "margin-top:0.7rem" }, plots.map(linePlot)));
}
