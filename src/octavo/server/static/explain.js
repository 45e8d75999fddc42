// Why one request took what it took, in sentences: what was a hit, where the nearest cached text parted from it, what it
// waited for, and what preemptions cost.

import { errorText, request } from "./connection.js";
import { element, formatCount, formatNumber, formatSeconds, plural, shortenId } from "./format.js";

const WAITS = {
  arrival: "behind others",
  seats: "for a seat",
  tokens: "for token budget",
  blocks: "for blocks",
  prefix: "for a prefix that another was computing",
  preempted: "after being preempted",
};
const SHORT_S = 0.005;

/** Fills a node with the explanation of a request, or with why there is none. */
export async function explainInto(node, id) {
  try {
    const response = await request(`live/requests/${encodeURIComponent(id)}`);
    if (!response.ok) throw new Error(await errorText(response));
    node.replaceChildren(...sentences(await response.json()).map((words) => element("p", "", ...words)));
  } catch (error) {
    node.replaceChildren(element("p", "note", error.message));
  }
}

/** One array of texts and elements for each sentence. */
export function sentences(why) {
  return [hits(why), nearMiss(why.near_miss), waits(why), ...why.preemptions.map((each) => preemption(each, why.request_id)),
    memory(why), times(why)]
    .filter(Boolean)
    .map((words) => (Array.isArray(words) ? words : [words]));
}

function hits({ hits: found, num_prompt_tokens: prompt }) {
  if (!found) return `${plural(prompt, "prompt token")}; not looked up in the prefix cache yet.`;
  const hit = found.num_block_tokens + found.num_copied_tokens;
  if (hit === 0) return `None of ${plural(prompt, "prompt token")} were cached: all were computed.`;
  const parts = [];
  if (found.num_block_tokens) {
    const blocks = (found.block_ids[0] ?? []).filter(Boolean).length;
    const where = blocks ? `in ${plural(blocks, "shared block")}` : "shared with the first answer";
    parts.push(`${formatCount(found.num_block_tokens)} ${where}`);
  }
  if (found.num_copied_tokens) {
    const sources = found.copied_from.map(formatCount).join(", ");
    parts.push(`${formatCount(found.num_copied_tokens)} copied out of block ${sources}`);
  }
  return `${formatCount(hit)} of ${plural(prompt, "prompt token")} were a hit (${parts.join(", ")}); `
    + `${formatCount(found.num_missed_tokens)} computed.`;
}

function nearMiss(miss) {
  if (!miss) return null;
  const words = [`The nearest cached text (block ${formatCount(miss.block_id)}) goes on differently from token ${formatCount(miss.position)} on`];
  if (miss.text != null) words.push(": ", element("code", "", miss.cached_text), " there, ", element("code", "", miss.text), " here");
  return [...words, "."];
}

/** What it waited for and how busy it was, or that nothing was wrong. */
function waits(why) {
  const long = why.waits.filter(({ seconds }) => seconds >= SHORT_S);
  const pace = paceOf(why);
  const waited = long.length
    ? `It waited ${long.map(({ reason, seconds }) => `${formatSeconds(seconds)} ${WAITS[reason] ?? reason}`).join(", ")}`
    : why.preemptions.length ? "It did not wait" : "No waits, no preemptions";
  if (!pace) return `${waited}.`;
  return long.length || why.preemptions.length ? `${waited}. It ran ${pace}.` : `${waited}: ${pace}.`;
}

function paceOf({ times: taken, num_output_tokens: output, mean_others_running: others }) {
  if (others == null) return "";
  const beside = others < 0.05 ? "with nothing else running" : `beside ${formatNumber(others)} others on average`;
  if (taken.decode_s == null || output < 2) return beside;
  return `at ${formatSeconds(taken.decode_s / (output - 1))} a token, ${beside}`;
}

function preemption({ at_s: at, reason, for_request_id: other, num_blocks: blocks, num_recomputed_tokens: again }, own) {
  const why = reason === "priority" ? "to one of higher priority" : "because blocks ran out";
  const cost = again == null ? "" : `; ${plural(again, "token")} had to be computed again`;
  if (other === own) return `After ${formatSeconds(at)} it gave ${plural(blocks, "block")} back, since its own next token found none free${cost}.`;
  return [`After ${formatSeconds(at)} it gave ${plural(blocks, "block")} back ${why}, to `,
    element("code", "", shortenId(other)), `${cost}.`];
}

function memory({ peak_blocks: peak, num_copies: copies }) {
  const copied = copies ? `; ${plural(copies, "block")} copied` : "";
  return `It held ${plural(peak, "block")} at most${copied}.`;
}

function times({ times: taken, num_output_tokens: output, finish_reason: reason }) {
  if (taken.ttft_s == null) return null;
  const total = taken.e2e_s == null ? "" : `, ${formatSeconds(taken.e2e_s)} in all`;
  const end = reason ? `, ended by ${reason}` : "";
  return `First token after ${formatSeconds(taken.ttft_s)}${total}; ${plural(output, "output token")}${end}.`;
}
