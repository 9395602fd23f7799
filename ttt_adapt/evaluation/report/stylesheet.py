"""The page's CSS: one column, light and dark by the reader's preference, fit for print."""

from ttt_adapt.evaluation.report.palette import css_variables

_LIGHT = css_variables(dark=False) + "--panel:#f4f6f8;--good:#00664a;--bad:#a33c00;"
_DARK = css_variables(dark=True) + "--panel:#1d2126;--good:#4fd3a8;--bad:#ff9d5c;"

CSS = (
    f":root{{color-scheme:light dark;--font:system-ui,-apple-system,'Segoe UI',Roboto,"
    f"'Noto Sans','Noto Sans CJK SC',sans-serif;"
    f"--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:62rem;padding:2rem 1.25rem 4rem;font:1rem/1.5 var(--font);
 color:var(--ink);background:var(--paper);overflow-wrap:anywhere}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .75rem}
h2{font-size:1.2rem;margin:2.75rem 0 .5rem;padding-top:.9rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.75rem 0 .35rem}
h4{font-size:.92rem;margin:0 0 .15rem}
p{margin:.5rem 0;max-width:46rem}
.result{font-size:1.13rem;line-height:1.5}
.note,figcaption,.fine{color:var(--muted);font-size:.875rem}
.warning{border-left:3px solid var(--bad);padding-left:.75rem}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:1rem 0;
 font-size:.925rem}
dl.facts dt{color:var(--muted)}dl.facts dd{margin:0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;
 overflow-wrap:normal}
th,td{padding:.32rem .9rem .32rem 0;text-align:right;vertical-align:top;
 border-bottom:1px solid var(--grid)}
th:last-child,td:last-child{padding-right:.2rem}
td{white-space:nowrap}
thead th{font-weight:600;color:var(--muted);vertical-align:bottom;
 border-bottom:1px solid var(--muted)}
th[scope=row],.text{text-align:left}
th[scope=row]{font-weight:600;min-width:7.5rem;max-width:15rem;overflow-wrap:anywhere}
td.text{white-space:normal;min-width:9rem;overflow-wrap:anywhere}
td small{display:block;color:var(--muted);font-size:.88em;line-height:1.35}
.best td,.best th{background:var(--panel)}
.swatch{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.45em}
.good{color:var(--good)}.bad{color:var(--bad)}
figure{margin:1rem 0 0}
figure svg{display:block;width:100%;height:auto;max-width:48rem}
figure svg text{font-family:var(--font)!important}
figcaption{margin-top:.35rem;max-width:46rem}
.arms{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,13.5rem),1fr));
 gap:1rem 1.25rem;margin-top:.6rem}
.arm{border-top:3px solid var(--grid);padding-top:.45rem;min-width:0}
ol.passages{margin:.4rem 0 0;padding:0;list-style:none}
ol.passages li{margin:0 0 .6rem}
.where{font-size:.82rem;color:var(--muted)}
.where b{color:var(--ink);font-weight:600}
.repeat{display:inline-block;border:1px solid currentColor;border-radius:3px;padding:0 .3em;
 font-size:.76rem;color:var(--bad)}
blockquote{margin:.15rem 0 0;padding:.35rem .5rem 0;background:var(--panel);border-radius:3px;
 border-bottom:.35rem solid var(--panel);font:.76rem/1.4 var(--mono);white-space:pre-wrap;
 display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:6;overflow:hidden}
details{margin:.6rem 0}
summary{cursor:pointer}
pre{background:var(--panel);padding:.75rem;border-radius:4px;overflow-x:auto;
 font:.8rem/1.45 var(--mono)}
@media (max-width:40rem){
 body{padding:1.25rem .9rem 3rem}
 h1{font-size:1.4rem}
 figure{margin:1rem -.9rem 0}figcaption{padding:0 .9rem}
 figure .scroll svg{min-width:27rem}
}
@media print{
 body{max-width:none;padding:0;font-size:10pt}
 h2,h3,h4{break-after:avoid}
 figure,.arm,tr,li{break-inside:avoid}
 .scroll{overflow:visible}
 table{font-size:8.5pt}
 figure svg{max-height:20cm}
 .arms{grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr))}
 h3+p{break-after:avoid}
}
"""
)
