"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text; // never as HTML: tokens are data
    return element;
  };
  const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
  all("[data-script]").forEach((element) => { element.hidden = false; });

  // ---------------------------------------------------------------- tables that sort by a column
  all("table.sortable").forEach((table) => {
    const heads = all("thead th", table), body = table.tBodies[0];
    heads.forEach((head, column) => {
      const key = (row) => row.cells[column].dataset.key || row.cells[column].textContent.trim();
      const button = make("button", "sort", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const falling = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const compared = (a, b) => {
          const [x, y] = [Number(key(a)), Number(key(b))];
          if (Number.isNaN(x) || Number.isNaN(y)) return key(a).localeCompare(key(b));
          return x === y ? 0 : x - y; // infinite ones have no difference
        };
        body.append(...[...body.rows].sort((a, b) => (falling ? compared(b, a) : compared(a, b))));
      });
    });
  });

  // ---------------------------------------------------------------- head map: scorer, order, arrow keys
  const scorer = byId("scorer"), order = byId("order");
  if (scorer) {
    const show = () => all("[data-scorer]").forEach((map) => { map.hidden = map.dataset.scorer !== scorer.value; });
    scorer.addEventListener("change", show);
    show();
  }
  const original = new Map();
  all("table.heat tbody").forEach((body) => {
    original.set(body, all("tr", body));
    all("tr", body).forEach((row) => original.set(row, all("td.cell", row)));
  });
  const score = (cell) => (cell.dataset.score === undefined ? -Infinity : Number(cell.dataset.score));
  const mean = (row) => {
    const known = original.get(row).map(score).filter(Number.isFinite);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : -Infinity;
  };
  const sort = () => {
    const heads = order.value.includes("heads"), layers = order.value.includes("layers");
    all("table.heat").forEach((table) => table.classList.toggle("sorted", heads));
    all("table.heat tbody").forEach((body) => {
      const rows = [...original.get(body)];
      const titles = rows.filter((row) => !original.get(row).length);
      const sites = rows.filter((row) => original.get(row).length);
      if (layers) sites.sort((a, b) => mean(b) - mean(a));
      body.append(...titles, ...sites);
      sites.forEach((row) => {
        const cells = [...original.get(row)];
        if (heads) cells.sort((a, b) => score(b) - score(a));
        row.querySelector("th").after(...cells);
      });
    });
  };
  if (order) order.addEventListener("change", sort);
  all("table.heat").forEach((table) => table.addEventListener("keydown", (event) => {
    const cell = event.target.closest("td.cell");
    if (!cell || !event.key.startsWith("Arrow")) return;
    const rows = all("tr", table).map((row) => all("td.cell", row)).filter((cells) => cells.length);
    moved(rows, cell, event, (found) => {
      const input = found.querySelector("input");
      input.checked = true;
      input.focus();
    });
  }));

  // Moves by one place in rows of unlike length, stops at the edges, and hands the new place on.
  function moved(rows, from, event, go) {
    const y = rows.findIndex((row) => row.includes(from)), x = rows[y].indexOf(from);
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const row = rows[Math.min(Math.max(y + down, 0), rows.length - 1)];
    event.preventDefault();
    go(row[Math.min(Math.max(x + right, 0), row.length - 1)]);
  }

  // ---------------------------------------------------------------- what can be copied
  if (navigator.clipboard) {
    all("pre[data-copy]").forEach((block) => {
      const button = make("button", "copy", "Copy");
      button.type = "button";
      button.setAttribute("aria-label", `Copy: ${block.getAttribute("aria-label")}`);
      button.addEventListener("click", () => navigator.clipboard.writeText(block.textContent).then(
        () => { button.textContent = "Copied"; }, () => { button.textContent = "Select it by hand"; }));
      block.before(button);
    });
  }

  // ---------------------------------------------------------------- attention
  const held = byId("attention-data");
  if (!held) return;
  const data = JSON.parse(held.textContent);
  const grid = byId("attention-grid"), example = byId("attention-example"), same = byId("attention-same");
  const chosenQuery = byId("attention-query"), zoom = byId("zoom");
  const patches = data.image ? data.image[0] * data.image[1] : 0;
  const raw = new Map();
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

  // The weights of one head in one example: bytes [queries, keys], and what 255 stands for.
  function weights(site, head) {
    const which = Number(example.value), key = `${site} ${which}`;
    if (!raw.has(key)) raw.set(key, bytes(data.sites[site].weights[which]));
    const [queries, keys] = data.sites[site].sizes[which], size = queries * keys;
    const values = raw.get(key).subarray(head * size, (head + 1) * size);
    return { values, queries, keys, peak: data.sites[site].peaks[which][head] };
  }

  // What one picture shows: of text all queries by all keys, of an image the weights of one query on the patches.
  function picture(site, head, query) {
    const found = weights(site, head);
    if (!data.image) return { ...found, height: found.queries, width: found.keys };
    const end = (query + 1) * found.keys;
    return { ...found, values: found.values.subarray(end - patches, end), height: data.image[0], width: data.image[1] };
  }
  const largest = (shown) => shown.values.reduce((a, b) => Math.max(a, b), 0) * shown.peak / 255;

  let ramp = [];
  function readRamp() {
    const style = getComputedStyle(document.documentElement);
    const steps = [...Array(9).keys()].map((i) => style.getPropertyValue(`--s${i}`).trim())
      .map((colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)));
    ramp = [...Array(256).keys()].map((level) => {
      const at = level / 255 * 8, low = Math.min(Math.floor(at), 7);
      return steps[low].map((value, i) => Math.round(value + (at - low) * (steps[low + 1][i] - value)));
    });
  }
  const level = (value, top) => ramp[top > 0 ? Math.min(255, Math.round(255 * value / top)) : 0];

  function paint(canvas, shown, top) {
    canvas.width = shown.width;
    canvas.height = shown.height;
    const context = canvas.getContext("2d"), pixels = context.createImageData(shown.width, shown.height);
    shown.values.forEach((value, i) => pixels.data.set([...level(value * shown.peak / 255, top), 255], 4 * i));
    context.putImageData(pixels, 0, 0);
  }

  const places = data.sites.flatMap((site, s) => site.heads.map((_, h) => [s, h]));
  const named = (s, h) => {
    const { label, heads } = data.sites[s];
    return `${/^\d+$/.test(label) ? "Layer " : ""}${label}, head ${heads[h]}`;
  };
  const told = (s, h) => [data.sites[s].states[h], data.sites[s].words[h]].filter(Boolean).join(", ");
  const thumbs = new Map();
  const query = () => (chosenQuery ? Number(chosenQuery.value) : 0);

  function build() {
    const widest = Math.max(...data.sites.map((site) => site.heads.length));
    grid.style.setProperty("--heads", Math.min(widest, 24));
    data.sites.forEach((site, s) => {
      const row = make("div", "maps-row");
      if (site.group && site.group !== (data.sites[s - 1] || {}).group) grid.append(make("h3", "", site.group));
      row.append(make("div", "maps-label", site.label));
      const line = make("div", "maps-line");
      site.heads.forEach((head, h) => {
        const button = make("button", `thumb ${site.states[h]}`), canvas = make("canvas");
        button.type = "button";
        button.tabIndex = thumbs.size ? -1 : 0;
        button.title = [`${site.name}, head ${head}`, told(s, h)].filter(Boolean).join(", ");
        const caption = site.states[h] === "removed" ? `${head} cut` : `${head}`;
        button.setAttribute("aria-label", `${caption}: attention of ${button.title}. Enlarge.`);
        canvas.setAttribute("aria-hidden", "true");
        const name = make("span", "thumb-name", `${head}`);
        if (site.states[h] === "removed") name.append(make("span", "cut", " cut"));
        button.append(canvas, name);
        button.addEventListener("click", () => enlarge(s, h));
        thumbs.set(`${s} ${h}`, button);
        line.append(button);
      });
      row.append(line);
      grid.append(row);
    });
    grid.addEventListener("keydown", (event) => {
      const from = event.target.closest(".thumb");
      if (!from || !event.key.startsWith("Arrow")) return;
      const rows = all(".maps-line", grid).map((line) => all(".thumb", line)).filter((row) => row.length);
      moved(rows, from, event, (to) => {
        from.tabIndex = -1;
        to.tabIndex = 0;
        to.focus();
      });
    });
  }

  function redraw() {
    const shown = places.map(([s, h]) => picture(s, h, query()));
    const tops = shown.map(largest), top = Math.max(...tops);
    places.forEach(([s, h], i) =>
      paint(thumbs.get(`${s} ${h}`).querySelector("canvas"), shown[i], same.checked ? top : tops[i]));
    byId("attention-top").textContent = same.checked ? percent(top) : "the largest weight of each picture";
    const text = data.examples[Number(example.value)];
    const words = text.targets.length ? `${text.tokens.join(" ")} → ${text.targets.join(" ")}` : text.tokens.join(" ");
    byId("attention-text").textContent = words;
    drawInput(byId("attention-input"), Number(example.value));
  }

  function drawInput(canvas, which) {
    const { pixels, size: [height, width] } = data.examples[which];
    canvas.hidden = !pixels;
    if (!pixels) return;
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d"), drawn = context.createImageData(width, height), colours = bytes(pixels);
    for (let i = 0; i < width * height; i++) {
      drawn.data.set([colours[3 * i], colours[3 * i + 1], colours[3 * i + 2], 255], 4 * i);
    }
    context.putImageData(drawn, 0, 0);
  }

  // ---------------------------------------------------------------- one head, large
  const range = byId("zoom-query"), map = byId("zoom-map"), matrix = byId("zoom-matrix");
  let current = [0, 0];

  function tokens(s) {
    const { tokens: read, targets } = data.examples[Number(example.value)], kind = data.sites[s].kind;
    const [queries, keys] = data.sites[s].sizes[Number(example.value)];
    const own = kind === "causal" && targets.length ? targets : read;
    const numbers = (words, n) => (words.length === n ? words : [...Array(n).keys()].map(String));
    return [numbers(kind === "cross" ? targets : own, queries), numbers(kind === "cross" ? read : own, keys)];
  }

  function enlarge(s, h) {
    current = [s, h];
    const { queries } = weights(s, h);
    range.max = queries - 1;
    range.value = data.image ? query() : Math.min(Number(range.value), queries - 1);
    byId("zoom-title").textContent = named(s, h);
    const { title } = data.examples[Number(example.value)];
    byId("zoom-words").textContent = [data.sites[s].name, told(s, h), title].filter(Boolean).join(", ");
    const [beside, under] = data.image ? [[], []] : tokens(s);
    label(byId("zoom-rows"), beside);
    label(byId("zoom-columns"), under);
    thumbs.forEach((thumb, place) => { thumb.tabIndex = place === current.join(" ") ? 0 : -1; });
    if (!zoom.open) zoom.showModal();
    focusQuery();
  }

  function label(element, words) {
    element.replaceChildren(...(words.length > 40 ? [] : words).map((word) => make("span", "", word)));
  }

  function focusQuery() {
    const [s, h] = current, at = Number(range.value), found = weights(s, h), shown = picture(s, h, at);
    paint(map, shown, largest(shown));
    matrix.style.setProperty("--columns", shown.width);
    matrix.style.setProperty("--rows", shown.height);
    byId("zoom-line").hidden = Boolean(data.image);
    byId("zoom-line").style.top = `${100 * at / shown.height}%`;
    byId("zoom-line").style.height = `${100 / shown.height}%`;
    const row = [...found.values.subarray(at * found.keys, (at + 1) * found.keys)].map((v) => v * found.peak / 255);
    const [names, keys] = data.image ? [data.queries, patchNames(found.keys)] : tokens(s);
    const top = Math.max(...row), best = row.map((v, i) => [v, i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    const quoted = (word) => (data.image ? word : `“${word}”`);
    const said = `${quoted(names[at])} looks at: ${best.map(([v, i]) => `${quoted(keys[i])} ${percent(v)}`).join(", ")}`;
    byId("zoom-says").textContent = said[0].toUpperCase() + said.slice(1);
    range.setAttribute("aria-valuetext", names[at]);
    const sentence = byId("zoom-keys");
    sentence.hidden = Boolean(data.image);
    sentence.replaceChildren(...(data.image ? [] : keys).map((word, i) => {
      const token = make("span", "token", word), colour = level(row[i], top);
      token.style.background = `rgb(${colour.join(" ")})`;
      token.style.color = colour[0] * 0.299 + colour[1] * 0.587 + colour[2] * 0.114 > 140 ? "#10201f" : "#ffffff";
      token.title = percent(row[i]);
      return token;
    }));
    drawInput(byId("zoom-input"), Number(example.value));
    byId("zoom-own").hidden = byId("zoom-input").hidden;
    byId("zoom-patch").hidden = !data.image || data.rows[at] < found.keys - patches;
    if (data.image) {
      const place = data.rows[at] - (found.keys - patches), [height, width] = data.image;
      Object.assign(byId("zoom-patch").style, {
        left: `${100 * (place % width) / width}%`, top: `${100 * Math.floor(place / width) / height}%`,
        width: `${100 / width}%`, height: `${100 / height}%`,
      });
    }
  }

  function patchNames(keys) {
    const own = keys - patches, width = data.image[1];
    return [...Array(keys).keys()].map((i) => {
      if (i < own) return own === 1 ? "class token" : `own token ${i + 1}`;
      return `patch in row ${Math.floor((i - own) / width) + 1}, column ${(i - own) % width + 1}`;
    });
  }

  function step(by) {
    const at = places.findIndex(([s, h]) => s === current[0] && h === current[1]);
    enlarge(...places[(at + by + places.length) % places.length]);
  }

  readRamp();
  build();
  redraw();
  [example, same, chosenQuery].forEach((control) => control && control.addEventListener("change", redraw));
  range.addEventListener("input", focusQuery);
  byId("zoom-before").addEventListener("click", () => step(-1));
  byId("zoom-after").addEventListener("click", () => step(1));
  byId("zoom-close").addEventListener("click", () => zoom.close());
  zoom.addEventListener("close", () => thumbs.get(current.join(" ")).focus());
  zoom.addEventListener("click", (event) => { if (event.target === zoom) zoom.close(); });
  map.addEventListener("click", (event) => { // of text: the row that was pointed at becomes the query
    const place = map.getBoundingClientRect();
    if (data.image) return;
    range.value = Math.floor((event.clientY - place.top) / place.height * map.height);
    focusQuery();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readRamp();
    redraw();
    if (zoom.open) focusQuery();
  });
})();
