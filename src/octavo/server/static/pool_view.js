// The pool view: figures with their recent past, advice, the map, memory and latency, all from one live document.

import { BlockTip } from "./block_tip.js";
import { FinishedView } from "./finished_view.js";
import { $, element, formatBytes, formatCount, formatNumber, formatRatio, formatSeconds, plural, setText, withCode } from "./format.js";
import { PoolMap, STATE } from "./pool_map.js";
import { RequestsView } from "./requests_view.js";
import { Sparkline } from "./sparkline.js";

const HISTORY_S = 180;
const TILES = {
  usage: { ceiling: 1, series: "usage_ratio" },
  hits: { ceiling: 1, series: "hit_ratio" },
  output: { series: "output_tokens_per_s" },
  requests: { series: "running" },
  preemptions: { series: "preemptions_per_min" },
};
const NOW_S = 5;
const LATENCIES = [
  ["ttft_s", "first token"],
  ["itl_s", "between tokens"],
  ["queue_s", "in the queue"],
  ["e2e_s", "whole answer"],
];
const LEGEND = [
  [STATE.free, "free", "free"],
  [STATE.cached, "cached", "cached"],
  [STATE.used, "used", "in use"],
  [STATE.shared, "shared", "shared by 2, 3, 5 or more"],
  [STATE.pinned, "pinned", "being copied"],
];
const WAITING = { seats: "for a seat", tokens: "for token budget", blocks: "for blocks", prefix: "for a shared prefix" };

export class PoolView {
  constructor() {
    this.tip = null;
    this.map = new PoolMap($("map"), { onPoint: (pointed) => this.tip?.show(pointed) });
    this.tip = new BlockTip(this.map);
    this.finished = new FinishedView();
    this.requests = new RequestsView(this.map, {
      onMark: (request) => this.map.mark(request ? request.tables.flat().filter(Boolean) : []),
      onReadEnd: (id) => this.finished.open(id),
    });
    this.tiles = {};
    for (const [name, { ceiling }] of Object.entries(TILES)) {
      const node = $(`tile-${name}`);
      this.tiles[name] = {
        figure: node.querySelector(".figure"),
        note: node.querySelector(".note"),
        line: new Sparkline(node, { ceiling }),
        values: [],
      };
    }
    this.lastSecond = -Infinity;
    this.legend = LEGEND.map(([state, className, words]) => {
      const count = element("b");
      $("legend").append(element("li", "", element("span", `swatch ${className}`), `${words} `, count));
      return { state, count };
    });
    this.latencies = LATENCIES.map(([key, words]) => addRow($("latency"), words, key));
    this.bar = ["used", "cached", "free"].map((className) => $("memory-bar").appendChild(element("i", `swatch-${className}`)));
    this.memory = ["in use", "cached", "free", "pool"].map((words) => addRow($("memory"), words));
    setText($("base-url"), new URL("v1", document.baseURI).href);
  }

  show(live) {
    this.showTiles(live);
    this.showAdvice(live.advice);
    setText(
      $("pool-facts"),
      `${formatCount(live.num_blocks)} blocks of ${live.block_size_tokens} tokens, ${formatBytes(live.block_bytes)} each`,
    );
    this.map.show(live.blocks);
    this.tip.update(live);
    this.requests.show(live);
    this.showLegend(live.blocks.states);
    this.showMemory(live);
    this.latencies.forEach(({ key, cells }) => {
      ["p50", "p90", "p99"].forEach((name, index) => setText(cells[index], formatSeconds(live.latency[key]?.[name])));
    });
  }

  showTiles(live) {
    const { totals, rates, means } = live;
    const { tiles } = this;
    setFigure(tiles.usage, formatRatio(totals.usage_ratio), "");
    setText(tiles.usage.note, `${formatCount(totals.referenced_blocks)} of ${plural(live.num_blocks, "block")}`);
    setFigure(tiles.hits, formatRatio(means.hit_ratio), "");
    setText(tiles.hits.note, means.hit_ratio == null ? "no prompt in the last minute" : "of prompt tokens, last minute");
    setFigure(tiles.output, formatNumber(recentMean(rates.output_tokens_per_s)), "tokens/s");
    setText(tiles.output.note, `${formatNumber(recentMean(rates.prompt_tokens_per_s))} prompt tokens/s`);
    setFigure(tiles.requests, formatCount(totals.num_running), "running");
    setText(tiles.requests.note, totals.num_waiting ? `${formatCount(totals.num_waiting)} waiting${whyWaiting(live)}` : "none waiting");
    setFigure(tiles.preemptions, formatNumber(means.preemptions_per_min), "a minute");
    setText(tiles.preemptions.note, means.preemptions_per_min ? "blocks ran out" : "none in the last minute");
    this.showHistory(rates);
  }

  /** Appends the seconds that are new, so that the lines reach further back than one document does. */
  showHistory(rates) {
    const known = this.lastSecond;
    const first = rates.time_s.findIndex((second) => second > known);
    for (const [name, { series }] of Object.entries(TILES)) {
      const { values, line } = this.tiles[name];
      if (first >= 0) values.push(...rates[series].slice(first));
      values.splice(0, Math.max(0, values.length - HISTORY_S));
      line.draw(values, HISTORY_S);
    }
    this.lastSecond = Math.max(known, rates.time_s.at(-1) ?? known);
  }

  showAdvice(advice) {
    $("advice").hidden = advice.length === 0;
    const text = advice.join("\n");
    if (text === this.advice) return;
    this.advice = text;
    $("advice").replaceChildren(...withCode(text));
  }

  showLegend(states) {
    const counts = [0, 0, 0, 0, 0];
    for (const state of states) counts[state] += 1;
    this.legend.forEach(({ state, count }) => setText(count, formatCount(counts[state])));
  }

  showMemory(live) {
    const { totals } = live;
    const blocks = [totals.referenced_blocks, totals.cached_blocks, totals.never_used_blocks, live.num_blocks];
    this.bar.forEach((part, index) => { part.style.flexGrow = blocks[index]; });
    this.memory.forEach(({ cells }, index) => {
      setText(cells[0], formatCount(blocks[index]));
      setText(cells[1], formatCount(blocks[index] * live.block_size_tokens));
      setText(cells[2], formatBytes(blocks[index] * live.block_bytes));
    });
  }
}

function addRow(table, words, key = null) {
  const cells = [element("td"), element("td"), element("td")];
  table.tBodies[0].append(element("tr", "", element("td", "", words), ...cells));
  return { key, cells };
}

/** Mean of the last seconds: steadier than one, more present than a minute. */
function recentMean(values) {
  const recent = values.slice(-NOW_S);
  return recent.length ? recent.reduce((sum, value) => sum + value, 0) / recent.length : null;
}

function setFigure(tile, number, unit) {
  if (tile.figure.dataset.shown === number) return;
  tile.figure.dataset.shown = number;
  tile.figure.replaceChildren(number, ...(unit ? [element("small", "", unit)] : []));
}

/** The most frequent reason, if one is known. */
function whyWaiting(live) {
  const counts = new Map();
  for (const one of live.requests) {
    if (WAITING[one.wait_reason]) counts.set(one.wait_reason, (counts.get(one.wait_reason) ?? 0) + 1);
  }
  const [most] = [...counts].sort((one, other) => other[1] - one[1]);
  return most ? ` ${WAITING[most[0]]}` : "";
}
