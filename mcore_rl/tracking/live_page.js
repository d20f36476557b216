// Asks the server that sent this page whether the run has gone on, and exchanges the sections that have changed.
(() => {
  const seconds = Number(document.body.dataset.live), note = document.getElementById("live");
  const sections = from => new Map([...from.querySelectorAll("main > section")].map(each => [each.id, each]));
  const copies = new Map([...sections(document)].map(([id, each]) => [id, each.cloneNode(true)]));
  let tag = document.body.dataset.tag, since = new Date();

  const folds = section => [...section.querySelectorAll("details")];
  const summary = fold => fold.querySelector("summary")?.textContent;

  function exchange(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");  // runs no script and loads nothing
    for (const [id, section] of sections(fresh)) {
      const old = document.getElementById(id);
      if (!old || copies.get(id)?.isEqualNode(section)) continue;
      copies.set(id, section.cloneNode(true));
      const open = new Set(folds(old).filter(fold => fold.open).map(summary));
      for (const fold of folds(section)) fold.open = open.has(summary(fold));
      old.replaceWith(document.adoptNode(section));
    }
    document.title = fresh.title;
    document.dispatchEvent(new Event("fresh"));
  }

  async function look() {
    if (document.hidden || !document.getSelection().isCollapsed) return;  // nobody looks, or somebody copies
    try {
      const answer = await fetch(location.pathname, {headers: {"If-None-Match": tag}, cache: "no-store"});
      if (answer.status === 200) {
        exchange(await answer.text());
        tag = answer.headers.get("ETag");
        since = new Date();
      }
      const ok = answer.ok || answer.status === 304;
      note.textContent = ok ? `Live: this page follows the run; it last changed at ${since.toLocaleTimeString()}.`
        : `Not live: the server answered ${answer.status}.`;
    } catch {
      note.textContent = "Not live: the server has ended. Start mcore-rl report --serve again for a new address.";
    }
  }

  const ahead = () => look().finally(() => setTimeout(ahead, 1000 * seconds));
  document.addEventListener("visibilitychange", look);
  ahead();
})();
