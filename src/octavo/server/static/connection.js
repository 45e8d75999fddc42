// Requests to the server that the page came from, with the key if it asks for one. EventSource cannot send headers, so
// the live stream is read with fetch, too.

import { $ } from "./format.js";

const STORED = "octavo-key";
let key = sessionStorage.getItem(STORED) || "";
let asking = null;

/** fetch with the key; on a 401 asks for one and tries again. */
export async function request(path, options = {}) {
  for (;;) {
    const headers = new Headers(options.headers);
    const used = key;
    if (used) headers.set("Authorization", `Bearer ${used}`);
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.status !== 401) return response;
    if (used === key) await askForKey();
  }
}

/** Asks once, however many requests wait for it. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      key = $("key").value.trim();
      sessionStorage.setItem(STORED, key);
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The events of a server-sent stream, as they arrive: {event, data}. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffered += value.replaceAll("\r\n", "\n");
      let end;
      while ((end = buffered.indexOf("\n\n")) >= 0) {
        const event = parseEvent(buffered.slice(0, end));
        buffered = buffered.slice(end + 2);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  const parsed = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) parsed.data += line.slice(5).trimStart();
    else if (line.startsWith("event:")) parsed.event = line.slice(6).trim();
  }
  return parsed;
}

/** The words of an error answer, in the form that OpenAI's API has, or what the status says. */
export async function errorText(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? JSON.stringify(body);
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
