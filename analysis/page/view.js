"use strict";
(() => {
  const progress = document.getElementById("progress");
  const [line, text] = ["summary", "pre"].map((name) => progress.querySelector(name));
  const waiting = document.getElementById("waiting");
  const main = document.querySelector("main");
  const every = 2000;
  let current = null;
  let shown = 0;
  let isLoading = false;

  const say = (place, text) => {
    if (place.textContent !== text) place.textContent = text;
  };
  const titled = (page) =>
    new Map(
      [...page.querySelectorAll("details.section")].map((part) => [
        part.querySelector("h2").textContent,
        part,
      ]),
    );

  // What a reader has chosen in the old page is chosen in the new one, where it still is.
  const keep = (old, next) => {
    const theme = old.document.documentElement.dataset.theme;
    if (theme) next.document.documentElement.dataset.theme = theme;
    const parts = titled(next.document);
    for (const [title, part] of titled(old.document)) {
      if (parts.has(title)) parts.get(title).open = part.open;
    }
    for (const figure of old.document.querySelectorAll("figure.chart")) {
      const newFigure = next.document.getElementById(figure.id);
      for (const select of figure.querySelectorAll("select")) {
        const same =
          newFigure && newFigure.querySelector(`[data-choice="${select.dataset.choice}"]`);
        // The first is nobody's choice: what comes first may change as runs end.
        if (same && select.selectedIndex > 0) {
          const hasOption = [...same.options].some((option) => option.value === select.value);
          if (hasOption) same.value = select.value;
        }
      }
    }
    for (const figure of next.document.querySelectorAll("figure.chart")) {
      if (figure.offsetParent !== null) {
        figure.dispatchEvent(new next.Event("change", { bubbles: true }));
      }
    }
    next.scrollTo(old.scrollX, old.scrollY);
  };

  const load = (page) => {
    const frame = document.createElement("iframe");
    frame.title = "Report";
    frame.style.visibility = "hidden";
    frame.src = `report.html?${page}`;
    isLoading = true;
    frame.addEventListener(
      "load",
      () => {
        if (current) {
          keep(current.contentWindow, frame.contentWindow);
          current.remove();
        } else {
          progress.open = false;
        }
        frame.style.visibility = "visible";
        current = frame;
        shown = page;
        isLoading = false;
        document.title = frame.contentDocument.title;
        waiting.remove();
      },
      { once: true },
    );
    main.append(frame);
  };

  const ask = async () => {
    try {
      const answer = await fetch("state.json");
      const { page, state, overview, note } = await answer.json();
      const made = page ? `page of ${new Date(page).toLocaleTimeString()}` : "no page yet";
      say(line, [state, made, page && note].filter(Boolean).join(" · "));
      say(text, overview);
      if (!page) {
        say(waiting, note || "No run has ended yet. The page comes by itself when one has.");
        progress.open = true;
      }
      // Who looks at runs behind a number is not interrupted.
      const isRead = current && current.contentDocument.querySelector("dialog[open]");
      if (page && page !== shown && !isLoading && !isRead) load(page);
    } catch {
      say(line, "batchscape view has ended, or cannot be reached: what is below stays as it was");
    }
    setTimeout(ask, every);
  };
  ask();
})();
