// The two panels, which lie over the conversation on narrow screens, and the theme.

import { recall, remember } from "./settings.js";

const $ = (id) => document.getElementById(id);
const NAMES = ["history", "settings"];

function isOpen(name) {
  return $(name).classList.contains("open");
}

function setOpen(name, open) {
  $(name).classList.toggle("open", open);
  $(`open-${name}`).setAttribute("aria-expanded", String(open));
}

/** Closes the panel that lies over the conversation; its button gets the focus. Returns whether there was one. */
export function closePanels() {
  const open = NAMES.filter(isOpen);
  for (const name of open) {
    const hadFocus = $(name).contains(document.activeElement);
    setOpen(name, false);
    if (hadFocus) $(`open-${name}`).focus();
  }
  return open.length > 0;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Use ${theme === "dark" ? "light" : "dark"} colours`;
}

export function startPanels() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(recall("localStorage", "theme") || (system.matches ? "dark" : "light"));
  follow();
  system.addEventListener("change", follow);
  $("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    remember("localStorage", "theme", document.documentElement.dataset.theme);
  });
  for (const name of NAMES) {
    $(`open-${name}`).addEventListener("click", () => {
      const opens = !isOpen(name);
      for (const other of NAMES) setOpen(other, opens && other === name);
    });
  }
  $("log").addEventListener("click", closePanels);
  $("prompt").addEventListener("focus", closePanels);
}
