// A chat with the server that the page came from. Every turn sends the whole conversation again, and shows how much of
// it the KV pool still held.

import { errorText, readEvents, request } from "./connection.js";
import { explainInto } from "./explain.js";
import { $, element, formatCount, formatNumber, formatRatio, formatSeconds, setText } from "./format.js";

export class Playground {
  constructor() {
    this.messages = [];
    this.model = null;
    this.running = null;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send();
      }
    });
    $("chat-reset").addEventListener("click", () => this.reset());
  }

  reset() {
    this.running?.abort();
    this.messages = [];
    $("turns").replaceChildren($("chat-empty"));
    $("chat-empty").hidden = false;
    $("message").focus();
  }

  async send() {
    const text = $("message").value.trim();
    if (!text) return;
    $("message").value = "";
    $("chat-empty").hidden = true;
    this.messages.push({ role: "user", content: text });
    const asked = element("div", "turn user", text);
    const answer = element("div", "turn assistant");
    $("turns").append(asked, answer);
    answer.scrollIntoView({ block: "end" });
    this.running = new AbortController();
    setText($("send"), "Stop");
    try {
      const content = await this.stream(answer, this.running.signal);
      this.messages.push({ role: "assistant", content });
    } catch (error) {
      // What failed is not part of the conversation: asked again, it would fail again.
      this.messages.pop();
      if (error.name !== "AbortError") {
        answer.classList.add("failed");
        answer.append(error.message);
      }
    } finally {
      this.running = null;
      setText($("send"), "Send");
    }
  }

  /** Streams one answer into a turn and returns its text. */
  async stream(turn, signal) {
    // The live view names the model; who may not see it has to ask.
    this.model ??= (await (await request("v1/models", { signal })).json()).data[0].id;
    const start = performance.now();
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal,
      body: JSON.stringify({
        model: this.model,
        messages: this.messages,
        temperature: Number($("temperature").value),
        max_completion_tokens: Number($("max-tokens").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await errorText(response));
    const written = turn.appendChild(document.createTextNode(""));
    let first = null;
    let usage = null;
    let id = null;
    let reason = null;
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      id ??= chunk.id;
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) {
        first ??= performance.now();
        written.appendData(choice.delta.content);
        if (isAtBottom()) turn.scrollIntoView({ block: "end" });
      }
      reason = choice?.finish_reason ?? reason;
    }
    if (usage) turn.append(facts(usage, first, start, reason, id));
    if (isAtBottom()) turn.scrollIntoView({ block: "end" });
    return written.data;
  }
}

function isAtBottom() {
  return window.innerHeight + window.scrollY > document.body.scrollHeight - 160;
}

/** The line under an answer: what of its prompt was a hit, and how fast it was. */
function facts(usage, first, start, reason, id) {
  const prompt = usage.prompt_tokens;
  const hits = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const bar = element("i");
  const meter = element("span", "meter", bar);
  bar.style.width = `${(hits / Math.max(1, prompt)) * 100}%`;
  const hit = `${formatCount(hits)} of ${formatCount(prompt)} prompt tokens were a hit (${formatRatio(hits / Math.max(1, prompt))})`;
  const parts = [meter, element("span", "hit-facts", hit)];
  const seconds = (performance.now() - (first ?? start)) / 1000;
  if (first !== null) parts.push(element("span", "", `first token after ${formatSeconds((first - start) / 1000)}`));
  if (usage.completion_tokens > 1) {
    const rate = formatNumber((usage.completion_tokens - 1) / seconds);
    parts.push(element("span", "", `${formatCount(usage.completion_tokens)} tokens, ${rate}/s`));
  }
  if (reason === "length") parts.push(element("span", "", "cut at max tokens"));
  const button = element("button", "quiet why-button", "why?");
  button.type = "button";
  // With the fact before it, so that it never stands alone on a line.
  const last = parts.pop();
  last.append(" ", button);
  const line = element("div", "turn-facts", ...parts, last);
  button.addEventListener("click", () => {
    const why = element("div", "why");
    button.remove();
    line.after(why);
    explainInto(why, id);
  });
  return line;
}
