// The samples of the page, by step, by score, and over the steps for one prompt.  A sample is shown as text, never as markup.
(() => {
  const PER_PAGE = 8;
  const chosen = {source: 0, step: Infinity, order: "high", which: "all", words: "", prompt: null, left: null,
    right: null, many: PER_PAGE};
  let data = null, root = null;

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const sample = row => ({step: row[0], prompt: row[1], score: row[2], mark: row[3], tokens: row[4], finish: row[5],
    response: row[9] ? row[9].map(turn => `${turn[0]}: ${turn[1]}`).join("\n\n") : row[6], error: row[7], at: row[8],
    turns: row[9], cut: row[10]});
  const told = score => score === null ? "no score" : String(Number(score.toPrecision(4)));

  const ORDERS = {
    high: ["highest score first", (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)],
    low: ["lowest score first", (a, b) => (a.score ?? -Infinity) - (b.score ?? -Infinity)],
    long: ["longest first", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)],
    drawn: ["as drawn", (a, b) => a.at - b.at],
  };
  const WHICH = {
    all: ["all", () => true],
    right: ["right", each => each.mark === 1],
    wrong: ["wrong", each => each.mark === 0],
    cut: ["cut off", each => each.cut],
    error: ["not graded", each => Boolean(each.error)],
  };

  function choice(label, options, value, changed) {
    const select = make("select", {}, ...options.map(([key, text]) => make("option", {value: key, textContent: text})));
    select.value = value;
    select.addEventListener("change", () => changed(select.value));
    return make("label", {}, label, select);
  }

  function redraw(changes) {
    Object.assign(chosen, {many: PER_PAGE}, changes);
    draw();
  }

  function mark(each) {
    if (each.mark === null) return "";
    return make("span", {className: each.mark ? "right" : "wrong", textContent: each.mark ? "right" : "wrong"});
  }

  function header(each, ...more) {
    const parts = [make("b", {textContent: each.score === null ? "no score" : `score ${told(each.score)}`}), mark(each)];
    if (each.tokens !== null) parts.push(`${each.tokens} tokens`);
    if (each.finish) parts.push(`finish: ${each.finish}`);
    if (each.error) parts.push(make("span", {className: "wrong", textContent: each.error}));
    return make("header", {}, ...parts.filter(Boolean).map(part => typeof part === "string" ? make("span", {}, part) : part),
      ...more);
  }

  // Pictures in the order of their places; one without a thumbnail is named.
  function album(numbers) {
    const shown = numbers.map((number, at) => {
      const [name, address] = data.pictures[number], alt = `picture ${at + 1} of ${numbers.length}: ${name}`;
      if (!address) return make("span", {className: "soft", textContent: `${alt}, not on this page`});
      return make("img", {src: address, alt, title: name});
    });
    return shown.length ? [make("div", {className: "album"}, ...shown)] : [];
  }

  function question(index) {
    const [source, id, text, gold, pictures] = data.prompts[index];
    const parts = [make("p", {className: "soft", textContent: `${source} ${id}`}), ...album(pictures),
      make("pre", {className: "prompt", textContent: text})];
    if (gold !== null) parts.push(make("p", {}, "Gold: ", make("b", {textContent: gold})));
    return parts;
  }

  // A turn: who said it, in the author's colour, what is trained of it, the weights that drew it, seconds, reward.
  // Of a validation nothing is trained, whoever said it.
  function turn([author, text, tokens, trained, reward, versions, seconds]) {
    const facts = [`${tokens} tokens`];
    if (shown().name === "rollouts") facts[0] += trained ? ", trained" : ", not trained";
    if (versions.length) facts.push(`weights ${versions.join(", ")}`);
    if (author === "tool") facts.push(`${seconds} s`);
    if (reward !== null) facts.push(`reward ${told(reward)}`);
    const known = ["model", "tool", "user"].includes(author) ? author : "";
    return make("section", {className: `turn ${known} ${trained ? "trained" : ""}`},
      make("p", {}, make("b", {textContent: author}), ` ${facts.join(" · ")}`), make("pre", {textContent: text}));
  }

  function answer(each) {
    return each.turns ? each.turns.map(turn) : [make("pre", {textContent: each.response})];
  }

  function card(each, samples) {
    const steps = new Set(samples.filter(other => other.prompt === each.prompt).map(other => other.step));
    const more = [];
    if (steps.size > 1) {
      const button = make("button", {type: "button", textContent: `this prompt at ${steps.size} steps`});
      button.addEventListener("click", () => {
        redraw({prompt: each.prompt, left: Math.min(...steps), right: Math.max(...steps)});
        root.scrollIntoView({block: "start"});
      });
      more.push(button);
    }
    return make("article", {className: "sample"}, header(each, ...more), ...question(each.prompt), ...answer(each));
  }

  function overSteps(samples) {
    const mine = samples.filter(each => each.prompt === chosen.prompt);
    const steps = [...new Set(mine.map(each => each.step))].sort((a, b) => a - b);
    const near = wanted => steps.reduce((best, step) => Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best);
    const options = steps.map(step => {
      const scores = mine.filter(each => each.step === step).map(each => told(each.score));
      return [step, `step ${step}: ${scores.slice(0, 4).join(", ")}`];
    });
    const side = (name, key) => {
      const step = near(chosen[key] ?? steps[0]);
      const answers = mine.filter(each => each.step === step);
      return make("div", {}, make("div", {className: "controls"},
        choice(name, options, step, value => redraw({[key]: Number(value)}))),
      ...answers.map(each => make("article", {className: "sample"}, header(each), ...answer(each))));
    };
    const back = make("button", {type: "button", textContent: "back to all prompts"});
    back.addEventListener("click", () => redraw({prompt: null}));
    return [make("div", {className: "controls"}, back), ...question(chosen.prompt),
      make("div", {className: "sides"}, side("before", "left"), side("after", "right"))];
  }

  function stepControl(steps, index) {
    const slider = make("input", {type: "range", min: 0, max: steps.length - 1, step: 1, value: index});
    slider.setAttribute("aria-label", "step");
    const go = to => redraw({step: to === steps.length - 1 ? Infinity : steps[to]});  // the last one follows the run
    slider.addEventListener("change", () => go(Number(slider.value)));
    const button = (text, name, to) => {
      const made = make("button", {type: "button", textContent: text, disabled: to < 0 || to >= steps.length});
      made.setAttribute("aria-label", name);
      made.addEventListener("click", () => go(to));
      return made;
    };
    return make("label", {className: "step"}, `step ${steps[index]}`, make("span", {className: "steps"},
      button("◀", "earlier", index - 1), slider, button("▶", "later", index + 1)));
  }

  function search() {
    const input = make("input", {type: "search", value: chosen.words, placeholder: "in prompt or answer"});
    input.addEventListener("change", () => redraw({words: input.value}));
    return make("label", {}, "text", input);
  }

  function list(source, samples) {
    const steps = source.steps;
    let index = steps.findLastIndex(step => step <= chosen.step);
    if (index < 0) index = 0;
    const words = chosen.words.toLowerCase();
    const listed = samples.filter(each => each.step === steps[index] && WHICH[chosen.which][1](each)
      && (!words || `${data.prompts[each.prompt][2]}\n${each.response}`.toLowerCase().includes(words)));
    listed.sort(ORDERS[chosen.order][1]);
    const named = table => Object.entries(table).map(([key, [text]]) => [key, text]);
    const controls = make("div", {className: "controls"}, stepControl(steps, index),
      choice("order", named(ORDERS), chosen.order, order => redraw({order})),
      choice("show", named(WHICH), chosen.which, which => redraw({which})), search());
    const cards = listed.slice(0, chosen.many).map(each => card(each, samples));
    const parts = [controls, make("p", {className: "soft", textContent: `${listed.length} samples`}), ...cards];
    if (listed.length > chosen.many) {
      const more = make("button", {type: "button", textContent: `${listed.length - chosen.many} more`});
      more.addEventListener("click", () => redraw({many: chosen.many + 5 * PER_PAGE}));
      parts.push(more);
    }
    return parts;
  }

  const shown = () => data.sources[Math.min(chosen.source, data.sources.length - 1)];

  function draw() {
    const source = shown(), index = data.sources.indexOf(source);
    const samples = source.rows.map(sample);
    const parts = [];
    if (data.sources.length > 1) {
      const named = data.sources.map((each, at) => [at, each.name]);
      parts.push(make("div", {className: "controls"}, choice("samples of", named, index,
        value => redraw({source: Number(value), step: Infinity, prompt: null}))));
    }
    parts.push(make("p", {className: "soft", textContent: source.note}));
    const known = chosen.prompt !== null && samples.some(each => each.prompt === chosen.prompt);
    root.replaceChildren(...parts, ...(known ? overSteps(samples) : list(source, samples)));
  }

  function begin() {
    const text = document.getElementById("sample-data")?.textContent;
    const place = document.getElementById("sample-browser");
    if (!text || !place || place === root) return;
    data = JSON.parse(text);
    root = place;
    draw();
  }

  document.addEventListener("fresh", begin);
  begin();
})();
