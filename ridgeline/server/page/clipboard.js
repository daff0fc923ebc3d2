// Copying text, also where the browser has no clipboard for us (plain HTTP on another machine).

import { element } from "./format.js";

const SHOWN_MS = 1500;

export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* not allowed: the other way */ }
  }
  return copySelected(text);
}

function copySelected(text) {
  const area = element("textarea", "hidden");
  area.value = text;
  const focused = document.activeElement;
  (focused?.closest("dialog") ?? document.body).append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

/** A button that copies what `text()` gives when it is pressed. `name` says what, for readers. */
export function copyButton(name, text, label = "Copy") {
  const button = element("button", "copy", label);
  button.type = "button";
  button.setAttribute("aria-label", name);
  button.addEventListener("click", () => copyFrom(button, text));
  return button;
}

/** Copies, and says so on the button for a moment. */
export async function copyFrom(button, text) {
  const label = button.dataset.label ??= button.textContent;
  const isCopied = await copy(text());
  button.textContent = isCopied ? "Copied" : "Not copied";
  announce(isCopied ? "Copied" : "The browser did not allow copying");
  setTimeout(() => { button.textContent = label; }, SHOWN_MS);
}

/** Said by screen readers, once. */
export function announce(text) {
  document.getElementById("announcement").textContent = text;
}
