// Light or dark: as the system, or as chosen here, which this browser keeps.

import { $, on } from "./show.js";

const STORED = "mlxserve-theme";

export function start(onChange) {
  const show = () => { document.documentElement.style.colorScheme = $("theme").value; };
  $("theme").value = localStorage.getItem(STORED) ?? "";
  show();
  on("theme", "change", () => {
    localStorage.setItem(STORED, $("theme").value);
    show();
    onChange();
  });
}
