// Light or dark: as the system, or as chosen here, which this browser keeps.

import { $ } from "./show.js";

const STORED = "mlxserve-theme";

function show(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  document.documentElement.style.colorScheme = theme || "light dark";
}

export function start(onChange) {
  $("theme").value = localStorage.getItem(STORED) ?? "";
  show($("theme").value);
  $("theme").addEventListener("change", () => {
    localStorage.setItem(STORED, $("theme").value);
    show($("theme").value);
    onChange();
  });
}
