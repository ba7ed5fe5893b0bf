// Before anything is drawn, so that nothing flashes: what was chosen last, else what the system says.
(function () {
  var chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch (error) { /* nothing is kept here */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
