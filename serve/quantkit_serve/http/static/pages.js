// The page map: a cell for a page (or for several of a large pool), coloured by owner.
import { colour, prepared } from "./charts.js";

const GAP = 1;

export class PageMap {
  constructor(canvas, legend, note) {
    Object.assign(this, { canvas, legend, note, pages: null, at: null, hues: new Map(), bad: new Set() });
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => this.move(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.move(this.at ?? 0));
    canvas.addEventListener("blur", () => this.move(null));
  }

  show(pages, findings) {
    this.pages = pages;
    this.bad = new Set(findings.map(([, page]) => Math.floor(page / pages.per_cell)));
    for (const owner of this.hues.keys()) if (!pages.owners.includes(owner)) this.hues.delete(owner);
    this.draw();
    this.drawLegend();
  }

  // Neighbours in time get hues far apart: steps of the golden angle, the lowest one that is free.
  hue(owner) {
    if (!this.hues.has(owner)) {
      const used = new Set(this.hues.values());
      let n = 0;
      while (used.has(n)) n += 1;
      this.hues.set(owner, n);
    }
    return (200 + this.hues.get(owner) * 137.5) % 360;
  }

  style(owner) {
    if (owner === undefined) return colour("free");
    if (owner === "cached") return colour("cached");
    if (owner === "quarantined") return colour("bad");
    if (owner === "shared") return colour("text");
    return `hsl(${this.hue(owner)} 60% ${colour("light")})`;
  }

  owner(cell) {
    const index = this.pages.cells[cell];
    return index < 0 ? undefined : this.pages.owners[index];
  }

  draw() {
    const { cells } = this.pages;
    const width = this.canvas.clientWidth;
    // the largest cells that keep the map below 260 pixels
    let side = 22;
    while (side > 4 && Math.ceil(cells.length / Math.floor(width / side)) * side > 260) side -= 1;
    this.side = side;
    this.columns = Math.max(Math.floor(width / side), 1);
    const { pen } = prepared(this.canvas, Math.max(Math.ceil(cells.length / this.columns) * side, side));
    cells.forEach((_, cell) => {
      const [x, y] = [(cell % this.columns) * side, Math.floor(cell / this.columns) * side];
      const size = side - GAP;
      pen.fillStyle = this.style(this.owner(cell));
      pen.fillRect(x, y, size, size);
      if (this.bad.has(cell)) {
        pen.strokeStyle = colour("bad");
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
        pen.beginPath();
        pen.moveTo(x, y);
        pen.lineTo(x + size, y + size);
        pen.stroke();
      }
      if (cell === this.at) {
        pen.strokeStyle = colour("focus");
        pen.lineWidth = 3;
        pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
      }
    });
  }

  drawLegend() {
    const num = new Map();
    for (const index of this.pages.cells) num.set(index, (num.get(index) ?? 0) + 1);
    const cells = this.pages.per_cell > 1 ? ` cells of ${this.pages.per_cell} pages` : "";
    const entry = (name, owner, n) => {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = this.style(owner);
      item.append(swatch, `${name.replace(/([0-9a-f]{8})[0-9a-f]{24}/, "$1…")}: ${n}${cells}`);
      item.title = name;
      return item;
    };
    const found = this.pages.owners.map((owner, index) => entry(owner, owner, num.get(index) ?? 0));
    if (this.bad.size) {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = "swatch wrong";
      item.append(swatch, "crossed out: a reference to it had a wrong tag");
      found.unshift(item);
    }
    this.legend.replaceChildren(entry("free", undefined, num.get(-1) ?? 0), ...found);
  }

  move(cell) {
    this.at = cell;
    if (!this.pages?.cells.length) return;
    this.draw();
    if (cell === null) return;
    const { per_cell: per, count } = this.pages;
    const first = cell * per;
    const name = per > 1 ? `Pages ${first} to ${Math.min(first + per, count) - 1}` : `Page ${first}`;
    this.note.textContent = `${name}: ${this.owner(cell) ?? "free"}${this.bad.has(cell) ? ", had a wrong tag" : ""}`;
  }

  point(event) {
    if (!this.pages) return;
    const column = Math.floor(event.offsetX / this.side);
    const cell = Math.floor(event.offsetY / this.side) * this.columns + column;
    this.move(column < this.columns && cell < this.pages.cells.length ? cell : null);
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const step = steps[event.key];
    if (step === undefined || !this.pages?.cells.length) return;
    event.preventDefault();
    const next = (this.at ?? 0) + step;
    if (next >= 0 && next < this.pages.cells.length) this.move(next);
  }
}
