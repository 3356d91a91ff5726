// Mark code and tables that continue to the right; the style sheet fades their edge.

function mark(box) {
  const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
  box.classList.toggle("continues", rest > 2);
}

document.addEventListener("DOMContentLoaded", () => {
  const boxes = ".highlight pre, .output pre, .pst-scrollable-table-container";
  const resized = new ResizeObserver((changes) => changes.forEach((each) => mark(each.target)));
  for (const box of document.querySelectorAll(boxes)) {
    mark(box);
    box.addEventListener("scroll", () => mark(box), { passive: true });
    resized.observe(box);
  }
});
