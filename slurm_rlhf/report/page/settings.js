"use strict";
// The configuration, what of it is no default, and where runs differ.

function settingsSection() {
  const body = el("tbody");
  const views = { ...(COMPARES ? { "where the runs differ": (row) => row.differs } : {}), "not the default": (row) => row.changed, "all keys": () => true };
  const search = el("input", { type: "search", placeholder: "search for a key", "aria-label": "search for a key" });
  let view = Object.keys(views)[0];
  const fill = () => {
    const wanted = search.value.toLowerCase();
    const rows = DATA.settings.filter((row) => views[wanted ? "all keys" : view](row) && (row.key + row.about).toLowerCase().includes(wanted));
    body.replaceChildren(...rows.map(settingRow));
    if (!rows.length) body.append(el("tr", {}, el("td", { colspan: RUNS.length + 2, class: "soft" }, "none")));
  };
  const buttons = Object.keys(views).map((name) => el("button", {
    "aria-pressed": String(name === view),
    onclick: (event) => {
      view = name;
      for (const button of event.target.parentNode.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button === event.target));
      fill();
    },
  }, name));
  search.addEventListener("input", fill);
  fill();
  const heads = ["key", ...RUNS.map((run) => (COMPARES ? run.name : "value")), "default"].map((name) => el("th", {}, name));
  return section("settings", "Configuration", "config.toml of the run directory has all of it, ready to be used again.", el("div", { class: "card" }, el("div", { class: "row" }, buttons, search),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body))));
}

function settingRow(row) {
  const text = (value) => (value === null ? "–" : value === "" ? "empty" : value);
  return el("tr", { class: COMPARES && row.differs ? "differs" : null, title: row.about }, el("td", { class: "key" }, row.key), row.values.map((value) => el("td", { class: "key" }, text(value))), el("td", { class: "key soft" }, text(row.default)));
}
