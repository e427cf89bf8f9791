// What the labelling page tells its person: hints for eyes and ears, and alerts that stay until their cause is gone.

import {el} from "./view.js";

export const $ = (id) => document.getElementById(id);

/** Say something to screen readers, and in the top bar where it is `visible`. */
export function announce(text, visible = false) {
  $("live").textContent = text;
  $("hint").textContent = visible ? text : "";
}

/** Show an alert; one of each name at a time. */
export function alertOnce(name, text, ...more) {
  clearAlert(name);
  $("alerts").append(el("p", {"data-alert": name}, text, ...more));
}

export function clearAlert(name) {
  for (const old of $("alerts").querySelectorAll(`[data-alert="${name}"]`)) old.remove();
}
