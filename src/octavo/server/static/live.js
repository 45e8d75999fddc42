// The live stream: snapshots of the pool in the form octavo.kv/1, unpacked for drawing, and the line to the server.

import { errorText, readEvents, request } from "./connection.js";
import { STATE } from "./pool_map.js";

const RETRY_MS = [500, 1000, 2000, 5000];

/** Follows /live for ever. Args: onLive(live), onState("connecting" | "live" | "lost", words). */
export async function followLive(onLive, onState) {
  let failures = 0;
  for (;;) {
    try {
      const response = await request("live");
      if (response.ok) {
        for await (const { event, data } of readEvents(response)) {
          if (event !== "kv") continue;
          failures = 0;
          onState("live", "live");
          onLive(unpack(JSON.parse(data)));
        }
        onState("lost", "reconnecting");
      } else {
        onState("lost", await errorText(response));
      }
    } catch {
      onState("lost", "no connection");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    failures += 1;
  }
}

/** A document with its blocks and tables as plain numbers. */
export function unpack(kv) {
  const requests = kv.requests.map((request) => ({
    ...request,
    isRunning: request.status === "running",
    tables: (request.tables ?? []).map(expandRuns),
  }));
  return { ...kv, requests, blocks: unpackBlocks(kv.blocks, kv.num_blocks) };
}

/** States of all blocks, and how many hold each: 0 where nobody is known to, 17 for 17 or more. */
function unpackBlocks(packed, count) {
  const states = unpackHalves(packed.states, count);
  const numShared = states.reduce((sum, state) => sum + (state === STATE.shared), 0);
  const more = unpackHalves(packed.num_holders, numShared);
  const holders = new Uint8Array(count);
  let next = 0;
  for (let index = 0; index < count; index += 1) {
    if (states[index] === STATE.used) holders[index] = 1;
    else if (states[index] === STATE.shared) holders[index] = 2 + more[next++];
  }
  return { states, holders };
}

/** Base64 of two codes a byte, the low half first. */
function unpackHalves(text, count) {
  const bytes = atob(text);
  const codes = new Uint8Array(count);
  for (let index = 0; index < count; index += 1) {
    const byte = bytes.charCodeAt(index >> 1);
    codes[index] = index & 1 ? byte >> 4 : byte & 15;
  }
  return codes;
}

/** Block ids from runs: [first, n] counts up, [first, -n] down, [0, n] are n blocks that left a window. */
function expandRuns(runs) {
  const ids = [];
  for (let at = 0; at < runs.length; at += 2) {
    const first = runs[at];
    const length = Math.abs(runs[at + 1]);
    const step = first === 0 ? 0 : Math.sign(runs[at + 1]);
    for (let index = 0; index < length; index += 1) ids.push(first + step * index);
  }
  return ids;
}
