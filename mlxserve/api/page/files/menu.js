// The menu of a chat. One element serves all rows; the browser opens it for their buttons, and closes it.

import { $, button } from "./show.js";

const GAP = 8; // pixels from the edge of the window

// A button that opens a menu; `items()` are [label, act], with a third value for a choice: whether it is chosen.
export function menuButton(items) {
  const made = button("⋯", () => fill(made, items()));
  made.popoverTargetElement = $("chat-menu");
  made.ariaHasPopup = "menu";
  return made;
}

function fill(opener, items) {
  const menu = $("chat-menu");
  menu.ariaLabel = opener.ariaLabel;
  menu.replaceChildren(...items.map(([label, act, isChosen]) => {
    const item = button(label, () => { menu.hidePopover(); act(); });
    item.role = isChosen === undefined ? "menuitem" : "menuitemradio";
    if (isChosen !== undefined) item.ariaChecked = isChosen;
    item.tabIndex = -1;
    return item;
  }));
  const { left, bottom } = opener.getBoundingClientRect();
  Object.assign(menu.style, { left: `${left}px`, top: `${bottom}px` });
}

function opened(menu) { // it is as large as it will be
  const { left, top, width, height } = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(GAP, Math.min(left, innerWidth - width - GAP))}px`;
  menu.style.top = `${Math.max(GAP, Math.min(top, innerHeight - height - GAP))}px`;
  menu.firstChild?.focus();
}

const STEPS = { ArrowDown: 1, ArrowUp: -1 };

function pressed(event, menu) {
  const items = [...menu.children];
  const at = items.indexOf(document.activeElement);
  const next = { Home: 0, End: items.length - 1 }[event.key] ?? (at + STEPS[event.key] + items.length) % items.length;
  if (event.key === "Tab" || event.key === "Escape") menu.hidePopover(); // the focus goes back to its button
  else if (Number.isNaN(next)) return;
  else items[next].focus();
  if (event.key !== "Tab") event.preventDefault();
}

export function start() {
  const menu = $("chat-menu");
  menu.addEventListener("toggle", ({ newState }) => { if (newState === "open") opened(menu); });
  menu.addEventListener("keydown", (event) => pressed(event, menu));
}
