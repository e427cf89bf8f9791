// Events wait here until the server has them on disk: one localStorage entry each, so that tabs never overwrite each
// other's, a reload loses nothing, and labels of one person are never sent as another's.

import {ask} from "./view.js";

/** A random id, also where crypto.randomUUID is missing (a page that is not on https or localhost). */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Outbox {
  /** `report(state)` is told {waiting, error, refused} whenever something changes. */
  constructor(project, annotator, report) {
    this.prefix = `prm-outbox/${project}/${annotator}/`;
    this.annotator = annotator;
    this.report = report;
    this.count = 0;
    this.pause = 0;
    this.timer = null;
    this.sending = null;
    addEventListener("online", () => this.send());
    addEventListener("pageshow", () => this.send());
  }

  /** What waits, oldest first: [key, event]. */
  waiting() {
    const found = [];
    for (let i = 0; i < localStorage.length; i++) {
      const key = localStorage.key(i);
      if (!key.startsWith(this.prefix)) continue;
      try { found.push([key, JSON.parse(localStorage.getItem(key))]); } catch { /* removed by another tab just now */ }
    }
    return found.filter(([, event]) => event).sort(([a], [b]) => (a < b ? -1 : 1));
  }

  /** Keep events in the browser and start sending. Throws where the browser cannot keep them: then none is kept. */
  add(events) {
    const kept = [];
    try {
      for (const event of events) {
        const order = String(Date.now()).padStart(15, "0") + String(this.count++).padStart(6, "0");
        const key = `${this.prefix}${order}-${event.id}`;
        localStorage.setItem(key, JSON.stringify(event));
        kept.push(key);
      }
    } catch (error) {
      kept.forEach((key) => localStorage.removeItem(key));
      throw error;
    }
    this.pause = 0;
    this.send();
  }

  /** Send what waits; a promise of true once nothing waits. */
  send() {
    clearTimeout(this.timer);
    this.sending ||= this._send().finally(() => { this.sending = null; });
    return this.sending;
  }

  async _send() {
    for (;;) {
      const batch = this.waiting().slice(0, 200);
      if (!batch.length) {
        this.report({waiting: 0});
        return true;
      }
      this.report({waiting: batch.length});
      try {
        const answer = await ask("/api/events", {annotator: this.annotator, events: batch.map(([, event]) => event)});
        const kept = new Set(answer.kept);
        for (const [key, event] of batch) {
          if (kept.has(event.id)) localStorage.removeItem(key);
          else {
            // refused for good: out of the way of the others, and shown; it stays in the browser under another name
            try { localStorage.setItem("prm-refused/" + key, JSON.stringify({event, reason: answer.refused[event.id]})); }
            catch { /* full: the message below remains */ }
            localStorage.removeItem(key);
            this.report({waiting: 0, refused: answer.refused[event.id] || "no reason given"});
          }
        }
        this.pause = 0;
        this.report({waiting: this.waiting().length});
      } catch (error) {
        this.pause = Math.min(this.pause ? this.pause * 2 : 500, 10000);
        this.report({waiting: batch.length, error});
        this.timer = setTimeout(() => this.send(), this.pause);
        return false;
      }
    }
  }
}
