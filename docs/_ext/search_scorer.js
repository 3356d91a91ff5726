// Pages of the guide precede notebooks, examples and project files that match as well.

Scorer.score = ([page, , , , score, , kind]) =>
  kind === "text" && /^(notebooks|examples|project)\//.test(page) ? score - 4 : score;
