// Keeps a page up to date: the server says that something changed, and the page fetches itself
// again and replaces the parts that differ. Without this script, every page works when reloaded.
"use strict";

const SHORTEST_MS = 1000;
const status = document.getElementById("live");
let due = false;
let busy = false;

function tell(text, state) {
  if (status.textContent !== text) status.textContent = text;
  status.className = `live ${state}`;
}

// Carries over what the reader did: selected runs, open tables, the focus, and scrolled lists.
function keep(before, after) {
  for (const box of before.querySelectorAll("input:checked")) {
    const same = after.querySelector(`#${CSS.escape(box.id)}`);
    if (same) same.checked = true;
  }
  for (const open of before.querySelectorAll("details[open]")) {
    const same = after.querySelector(`#${CSS.escape(open.id)}`);
    if (same) same.open = true;
  }
}

function scrolled(part) {
  const box = part.querySelector(".tall, .log");
  if (!box) return null;
  return { top: box.scrollTop, atEnd: box.scrollHeight - box.scrollTop - box.clientHeight < 8 };
}

// An id or, for links, the address finds the focused element again.
function focusedIn(part) {
  const focused = document.activeElement;
  if (!focused || focused === document.body || !part.contains(focused)) return null;
  if (focused.id) return `#${CSS.escape(focused.id)}`;
  const address = focused.getAttribute("href");
  if (address) return `a[href="${CSS.escape(address)}"]`;
  return focused.tagName === "SUMMARY" ? `#${CSS.escape(focused.parentElement.id)} > summary` : null;
}

function replace(before, after) {
  const focus = focusedIn(before);
  const place = scrolled(before);
  keep(before, after);
  before.replaceWith(after);
  if (focus) after.querySelector(focus)?.focus({ preventScroll: true });
  const box = after.querySelector(".tall, .log");
  if (place && box) {
    const follow = place.atEnd && box.classList.contains("log");
    box.scrollTop = follow ? box.scrollHeight : place.top;
  }
}

// The parts as the server sent them, to see which ones differ now.
const served = new Map();

function remember(page) {
  for (const part of page.querySelectorAll("[data-live]")) served.set(part.id, part.outerHTML);
}

async function refresh() {
  if (busy || document.hidden) {
    due = true;
    return;
  }
  busy = true;
  due = false;
  try {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (!answer.ok || answer.redirected) {
      location.reload();
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const before = [...document.querySelectorAll("[data-live]")].map((part) => part.id);
    const after = [...page.querySelectorAll("[data-live]")].map((part) => part.id);
    if (before.join() !== after.join()) {
      remember(page);
      replace(document.getElementById("main"), page.getElementById("main"));
    } else {
      for (const part of page.querySelectorAll("[data-live]")) {
        if (served.get(part.id) !== part.outerHTML) {
          served.set(part.id, part.outerHTML);
          replace(document.getElementById(part.id), document.adoptNode(part));
        }
      }
    }
    document.title = page.title;
    tell("live", "on");
  } catch {
    tell("cannot be reached", "off");
  }
  setTimeout(() => {
    busy = false;
    if (due) refresh();
  }, SHORTEST_MS);
}

remember(document);
for (const log of document.querySelectorAll(".log")) log.scrollTop = log.scrollHeight;

const address = document.body.dataset.events;
if (address) {
  const events = new EventSource(address);
  events.onopen = () => tell("live", "on");
  events.onmessage = refresh;
  events.onerror = () => tell("cannot be reached", "off");
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && due) refresh();
  });
}
