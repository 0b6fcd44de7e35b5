"use strict";
// Draws the page's timelines, in the reader's colours, and shows a collective where its name is clicked.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const elements = figures.map((_, i) => document.getElementById(`timeline-${i}`));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    displaylogo: false,
    responsive: true,
    scrollZoom: true,
    doubleClick: "reset",
    // These and no others: some of Plotly's own send the data to a server.
    modeBarButtons: [["pan2d", "zoom2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
  };

  const themed = (layout) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), tickcolor: colour("--line") };
    const result = {
      ...layout,
      paper_bgcolor: colour("--page"),
      plot_bgcolor: colour("--panel"),
      font: { color: colour("--text"), size: 13, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: {
        bgcolor: colour("--page"),
        bordercolor: colour("--less"),
        align: "left",
        font: { color: colour("--text"), size: 13 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--less"), activecolor: colour("--text") },
    };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) result[name] = { ...layout[name], ...axis };
    }
    return result;
  };

  const draw = () => elements.forEach((element, i) => {
    // What the reader zoomed to stays when the colours change.
    const range = element.layout?.xaxis?.range;
    const layout = themed(figures[i].layout);
    if (range) layout.xaxis.range = [...range];
    Plotly.react(element, figures[i].data, layout, config);
  });

  draw();
  dark.addEventListener("change", draw);

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".show");
    if (!button) return;
    const [start, end] = [Number(button.dataset.start), Number(button.dataset.end)];
    const margin = Math.max((end - start) * 0.5, 1e-6);
    const element = elements[Number(button.dataset.figure)];
    Plotly.relayout(element, { "xaxis.range": [start - margin, end + margin] });
    element.scrollIntoView({ behavior: "smooth", block: "nearest" });
  });
})();
