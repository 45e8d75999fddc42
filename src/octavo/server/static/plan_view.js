// What would fit: a form made from the server's option table, and the answer as a memory bar and a table of levers.

import { errorText, request } from "./connection.js";
import { $, element, formatBytes, formatCount, formatNumber, formatSeconds, plural } from "./format.js";

const PARTS = [
  ["weights", "weight_bytes"],
  ["activations", "activation_peak_bytes"],
  ["overhead", "overhead_bytes"],
  ["KV pool", "kv_pool_bytes"],
  ["free", "headroom_bytes"],
];

export class PlanView {
  constructor() {
    this.isOpen = false;
    $("plan-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
  }

  async open() {
    if (this.isOpen) return;
    this.isOpen = true;
    try {
      const response = await request("plan/form");
      if (!response.ok) throw new Error(await errorText(response));
      const form = await response.json();
      $("plan-fields").replaceChildren(...form.fields.map(field));
      await this.ask();
    } catch (error) {
      this.isOpen = false;
      $("plan-result").replaceChildren(element("section", "card error", error.message));
    }
  }

  async ask() {
    const words = new URLSearchParams();
    for (const input of $("plan-fields").querySelectorAll("input, select")) {
      if (input.value.trim()) words.set(input.name, input.value.trim());
    }
    $("plan-form").querySelector("button").disabled = true;
    try {
      const response = await request(`plan?${words}`);
      if (!response.ok) throw new Error(await errorText(response));
      $("plan-result").replaceChildren(...draw(await response.json()));
    } catch (error) {
      $("plan-result").replaceChildren(element("section", "card error", error.message));
    } finally {
      $("plan-form").querySelector("button").disabled = false;
    }
  }
}

function field({ name, label, help, choices, value, placeholder }) {
  const input = element(choices ? "select" : "input");
  input.name = name;
  input.title = help;
  if (choices) {
    const options = value ? choices : ["", ...choices];
    input.append(...options.map((choice) => new Option(choice || placeholder, choice, false, choice === value)));
  } else {
    input.placeholder = placeholder;
    input.autocomplete = "off";
    input.spellcheck = false;
  }
  return element("label", "", label, input);
}

function draw(plan) {
  return [memoryCard(plan), targetsCard(plan), leversCard(plan), sourcesCard(plan)].filter(Boolean);
}

function memoryCard(plan) {
  const card = element("section", "card");
  const where = plan.device ? `${plan.num_devices > 1 ? `${plan.num_devices} × ` : ""}${plan.device}` : "this machine";
  const scope = plan.num_devices > 1 ? "; sizes of one" : "";
  const head = element("div", "card-head", element("h2", "", plan.model), element("p", "note", `${plan.engine}, ${where}${scope}`));
  card.append(head, element("p", "verdict", verdict(plan)));
  const bar = element("div", "membar");
  PARTS.forEach(([, key], index) => {
    const part = bar.appendChild(element("i", `part-${index}`));
    part.style.flexGrow = Math.max(0, plan[key]);
    part.style.minWidth = plan[key] > 0 ? "2px" : "0";
  });
  card.append(bar);
  const legend = element("ul", "legend");
  PARTS.forEach(([words, key], index) => {
    if (plan[key] === 0) return;
    const name = key === "headroom_bytes" && plan[key] < 0 ? "missing" : words;
    const swatch = element("span", `swatch part-${index}`);
    legend.append(element("li", "", swatch, `${name} `, element("b", "", formatBytes(Math.abs(plan[key])))));
  });
  card.append(legend, figures(plan));
  for (const advice of plan.advice) {
    const flags = Object.entries(advice.options).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`);
    const line = element("p", `plan-advice ${advice.kind}`, advice.text);
    if (flags.length) line.append(" ", element("code", "", flags.join(" ")));
    card.append(line);
  }
  return card;
}

function verdict(plan) {
  if (!plan.fits) return "Does not fit.";
  const many = `${(Math.floor(plan.max_concurrency * 100 + 1e-6) / 100).toFixed(2)} requests of ${plural(plan.max_model_len, "token")} at once`;
  if (plan.concurrency_at_lengths == null) return many;
  return `${formatNumber(plan.concurrency_at_lengths)} requests of the asked lengths at once, or ${many}`;
}

function figures(plan) {
  const facts = [
    ["KV pool", `${plural(plan.num_blocks, "block")} of ${plan.block_size} tokens = ${plural(plan.pool_tokens, "token")}`],
    ["one token", `${formatBytes(plan.kv_bytes_per_token)} of keys and values, ${plan.kv_cache_dtype}`],
    ["longest request", plural(plan.longest_fitting_len, "token")],
    ["without paging", `${plural(plan.reserved_concurrency, "request")} at once, each with room for ${formatCount(plan.max_model_len)} tokens`],
    ["as large as the weights", `the KV cache of ${plural(plan.kv_tokens_like_weights, "token")}`],
    ["speed", speed(plan.ceilings)],
    ["next", plan.next_command],
  ];
  const list = element("dl", "facts");
  for (const [name, words] of facts) {
    if (!words) continue;
    list.append(element("dt", "", name), element("dd", "", name === "next" ? element("code", "", words) : words));
  }
  return list;
}

function speed(ceilings) {
  if (!ceilings) return "";
  const step = `a step of all that fit takes ${formatSeconds(ceilings.memory_step_s)}, bound by ${ceilings.bound}`;
  if (ceilings.device_requests == null) return step;
  return `${plural(ceilings.device_requests, "request")} within ${formatSeconds(ceilings.itl_s)} a token; ${step}`;
}

/** What would hold the asked number of requests at once. */
function targetsCard(plan) {
  if (!plan.targets.length) return null;
  const body = element("tbody");
  for (const target of plan.targets) {
    const flags = Object.entries(target.options).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`).join(" ");
    const copies = target.num_copies > 1 ? `${formatCount(target.num_copies)} copies of the model` : "";
    body.append(element("tr", "", element("td", "", target.name), element("td", "", element("code", "", flags)),
      element("td", "", copies), named("requests at once", formatNumber(target.concurrency))));
  }
  const table = element("table", "levers", body);
  return element("section", "card",
    element("div", "card-head", element("h2", "", `What holds ${plural(plan.target_concurrency, "request")} at once`)),
    element("div", "scroll", table));
}

/** A figure that says what it is where the table's head has no room. */
function named(name, figure) {
  const cell = element("td", "n", figure);
  cell.dataset.name = name;
  return cell;
}

function leversCard(plan) {
  if (!plan.levers.length) return null;
  const atLengths = plan.levers.some((lever) => lever.concurrency_at_lengths != null);
  const heads = ["change", "per token", "tokens in the pool", "requests at once", ""];
  const body = element("tbody");
  const requestsOf = (each) => (atLengths ? each.concurrency_at_lengths : each.max_concurrency) ?? 0;
  const gains = plan.levers.map((lever) => requestsOf(lever) / Math.max(1e-9, requestsOf(plan)));
  const most = Math.max(...gains, 1);
  plan.levers.forEach((lever, index) => {
    const bar = element("span", "gain", element("i"));
    bar.firstChild.style.width = `${(gains[index] / most) * 100}%`;
    const name = element("td", "", lever.name);
    if (lever.options) name.append(element("br"), element("code", "", lever.options));
    body.append(element("tr", lever.options ? "" : "hypothetical", name,
      named(heads[1], formatBytes(lever.kv_bytes_per_token)),
      named(heads[2], formatCount(lever.pool_tokens)),
      named(heads[3], formatNumber(requestsOf(lever))),
      element("td", "", bar, ` ×${formatNumber(gains[index])}`)));
  });
  const head = element("tr", "", ...heads.map((words, index) => element("th", index && index < 4 ? "n" : "", words)));
  const table = element("table", "levers", element("thead", "", head), body);
  const note = atLengths ? "requests of the asked lengths" : `requests of ${plural(plan.max_model_len, "token")}`;
  return element("section", "card",
    element("div", "card-head", element("h2", "", "What would change it"), element("p", "note", note)),
    element("div", "scroll", table));
}

function sourcesCard(plan) {
  const list = element("dl", "facts");
  for (const line of plan.sources) {
    const range = line.is_exact || line.low_bytes == null ? "" : ` (${formatBytes(line.low_bytes)} to ${formatBytes(line.high_bytes)})`;
    list.append(element("dt", "", line.name), element("dd", "", line.source + range));
  }
  return element("section", "card", element("div", "card-head", element("h2", "", "Where the figures come from")), list);
}
