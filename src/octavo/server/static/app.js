// The page: three tabs, and the live stream that the pool view is drawn from.

import { $, setText } from "./format.js";
import { followLive } from "./live.js";
import { PlanView } from "./plan_view.js";
import { Playground } from "./playground.js";
import { PoolView } from "./pool_view.js";

const VIEWS = ["pool", "playground", "plan"];
const pool = new PoolView();
const playground = new Playground();
const plan = new PlanView();
const updateTimes = [];
let latest = null;

function openView(name) {
  const shown = VIEWS.includes(name) ? name : "pool";
  for (const each of VIEWS) {
    $(`view-${each}`).hidden = each !== shown;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === shown));
  }
  if (shown === "pool" && latest) pool.show(latest);
  if (shown === "playground") $("message").focus();
  if (shown === "plan") plan.open(latest);
}

for (const name of VIEWS) $(`tab-${name}`).addEventListener("click", () => { location.hash = name; });
window.addEventListener("hashchange", () => openView(location.hash.slice(1)));
openView(location.hash.slice(1));

followLive(
  (live) => {
    latest = live;
    playground.model = live.model;
    setText($("model"), live.model);
    document.title = `${live.model} · octavo`;
    pool.finished.follow(live);
    if (document.hidden || $("view-pool").hidden) return;
    const start = performance.now();
    pool.show(live);
    updateTimes.push(performance.now() - start);
    if (updateTimes.length > 200) updateTimes.shift();
  },
  (state, words) => {
    $("status").dataset.state = state;
    setText($("status").lastElementChild, words);
    $("status").title = words;
  },
);

// For measurements, in milliseconds: the last redraws of the map, and what each snapshot took besides.
window.octavo = { frameTimes: () => [...pool.map.frameTimes], updateTimes: () => [...updateTimes] };
