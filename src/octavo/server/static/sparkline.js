// A small line over time: drawn as SVG so that it follows the colours of the page.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 34;

export class Sparkline {
  /** Args: host, the element it is added to; ceiling, the value at the top (without one, the largest shown). */
  constructor(host, { ceiling = null } = {}) {
    this.ceiling = ceiling;
    const svg = document.createElementNS(NAMESPACE, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.area = document.createElementNS(NAMESPACE, "path");
    this.line = document.createElementNS(NAMESPACE, "path");
    this.area.setAttribute("class", "spark-area");
    this.line.setAttribute("class", "spark-line");
    svg.append(this.area, this.line);
    host.append(svg);
  }

  /** Draws values, oldest first, against the right edge; where nothing is known (null), the line goes on as it was. */
  draw(values, capacity) {
    if (values.length < 2) return;
    const top = this.ceiling ?? Math.max(1e-9, ...values.map((value) => value ?? 0));
    const step = WIDTH / (capacity - 1);
    const first = capacity - values.length;
    let last = 0;
    const points = values.map((value, index) => {
      last = value ?? last;
      const x = (first + index) * step;
      const y = HEIGHT - 1.5 - Math.min(1, last / top) * (HEIGHT - 5);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    const line = `M${points.join("L")}`;
    if (line === this.drawn) return;
    this.drawn = line;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", `${line}V${HEIGHT}H${(first * step).toFixed(1)}Z`);
  }
}
