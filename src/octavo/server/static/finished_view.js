// The requests that ended last, as the page saw them go: their explanations stay open, and can still be asked for.

import { explainInto } from "./explain.js";
import { $, element, formatSeconds, plural, shortenId } from "./format.js";

const MAX_CLOSED = 8;

export class FinishedView {
  constructor() {
    this.list = $("finished-list");
    this.last = new Map();
    this.entries = new Map();
  }

  /** Lists those that are gone since the document before. Needs each document, also while the view is hidden. */
  follow(live) {
    const unfinished = new Map(live.requests.map((request) => [request.id, request]));
    for (const [id, request] of this.last) if (!unfinished.has(id)) this.add(request);
    for (const id of unfinished.keys()) this.drop(id); // an id used again
    this.last = unfinished;
    $("finished").hidden = this.entries.size === 0;
  }

  add(request) {
    const facts = element("span", "note", factsOf(request));
    const button = element("button", "quiet why-button", "why?");
    button.type = "button";
    const id = element("code", "", shortenId(request.id));
    id.title = request.id;
    const node = element("li", "", element("div", "finished-row", id, facts, button));
    const entry = { id: request.id, node, button, why: null };
    button.addEventListener("click", () => this.toggle(entry));
    this.entries.set(request.id, entry);
    // Below the ones being read, so that they stay where they are.
    const open = [...this.entries.values()].filter(({ why }) => why).map((each) => each.node);
    const before = [...this.list.children].findLast((each) => open.includes(each));
    if (before) before.after(node);
    else this.list.prepend(node);
    const closed = [...this.entries.values()].filter(({ why }) => !why);
    for (const { id: oldest } of closed.slice(0, Math.max(0, closed.length - MAX_CLOSED))) this.drop(oldest);
  }

  /** Opens what was being read of a request when it ended; the answer is now the whole one. */
  open(id) {
    const entry = this.entries.get(id);
    if (!entry || entry.why) return;
    this.list.prepend(entry.node);
    this.toggle(entry);
  }

  toggle(entry) {
    entry.button.setAttribute("aria-expanded", String(!entry.why));
    if (entry.why) {
      entry.why.remove();
      entry.why = null;
      return;
    }
    entry.why = entry.node.appendChild(element("div", "why"));
    explainInto(entry.why, entry.id);
  }

  drop(id) {
    this.entries.get(id)?.node.remove();
    this.entries.delete(id);
  }
}

/** What the last document told; how many tokens it wrote after that only its explanation knows. */
function factsOf(request) {
  const parts = [plural(request.num_prompt_tokens, "prompt token")];
  if (request.num_hit_tokens) parts.push(`${plural(request.num_hit_tokens, "token")} from cache`);
  if (request.num_preemptions) parts.push(`preempted ${plural(request.num_preemptions, "time")}`);
  parts.push(`about ${formatSeconds(request.age_s)}`);
  return parts.join(", ");
}
