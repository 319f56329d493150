//! The page of a run: figures, how latencies are distributed, throughput over time. Pure. Invariant: the page needs nothing
//! from outside, and its colours follow the reader's light or dark scheme.

use super::report::{Report, Server};
use super::summary::Measured;
use crate::cli::drawing::{COLORS, closed, escaped, line, opened, text, turned};
use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
/// Left, top, right and bottom edge of the plots.
const PLOT: (f64, f64, f64, f64) = (64.0, 20.0, 616.0, 244.0);
/// A line of the names of curves, below the plot.
const NAME: f64 = 20.0;
/// Points of a curve at most.
const POINTS: usize = 240;
/// Points of a short run's throughput.
const SPANS: f64 = 20.0;
const PAGE: &str = "<style>:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--line:#d5d9de}\
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--line:#30363d}}\
body{background:var(--paper);color:var(--ink);font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:84rem;padding:0 1rem}\
table{border-collapse:collapse}th,td{padding:.2rem .8rem;border-bottom:1px solid var(--line);text-align:right}\
th:first-child,td:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 30rem;max-width:41rem}\
svg{width:100%;height:auto}pre{overflow:auto}</style>";

/// A curve: name and points.
type Curve = (String, Vec<(f64, f64)>);

/// The page.
pub fn page(report: &Report, measured: &[Measured], blocks: &str) -> String {
    let names: Vec<String> = report.servers.iter().map(Server::title).collect();
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{0}</title>\n{PAGE}\n<h1>{0}</h1>\n",
        escaped(&format!("bench serve: {}", names.join(" and ")))
    );
    if report.stopped {
        out.push_str("<p><strong>The run was stopped early.</strong></p>\n");
    }
    out.push_str("<div class=\"plots\">\n");
    type Times = fn(&super::stream::Answer) -> Vec<f64>;
    let distributions: [(&str, Times); 4] = [
        ("Time to first token", |answer| vec![answer.ttft]),
        ("Time per output token", |answer| answer.tpot().into_iter().collect()),
        ("Time between tokens", |answer| answer.gaps.clone()),
        ("Time to the end", |answer| vec![answer.e2el]),
    ];
    for (title, times) in distributions {
        let curve = |(name, measured): (&String, &Measured)| {
            (name.clone(), distribution(measured.answers().flat_map(|(_, answer)| times(answer)).collect()))
        };
        let curves: Vec<Curve> = names.iter().zip(measured).map(curve).collect();
        out += &figure(title, ("ms", "part of all"), &curves);
    }
    let curve = |(name, measured): (&String, &Measured)| (name.clone(), throughput(measured));
    let curves: Vec<Curve> = names.iter().zip(measured).map(curve).collect();
    out += &figure("Throughput over time", ("s", "tokens/s"), &curves);
    let _ = writeln!(out, "</div>\n<h2>Figures</h2>\n<pre>{}</pre>\n</html>", escaped(blocks));
    out
}

/// How values are distributed: (ms, part that lies below).
fn distribution(mut seconds: Vec<f64>) -> Vec<(f64, f64)> {
    seconds.sort_by(f64::total_cmp);
    let points = POINTS.min(seconds.len());
    let part = |point: usize| point as f64 / points.saturating_sub(1).max(1) as f64;
    (0..points).map(|point| (1e3 * super::summary::quantile(&seconds, part(point)), part(point))).collect()
}

/// Tokens a second over time: a point for each span of a second, or of a part of a short run.
fn throughput(measured: &Measured) -> Vec<(f64, f64)> {
    let span = (measured.seconds() / SPANS).clamp(1e-3, 1.0);
    let spans = measured.tokens_by(span).into_iter().enumerate();
    spans.map(|(index, tokens)| ((index as f64 + 0.5) * span, tokens / span)).collect()
}

fn figure(title: &str, (across, up): (&str, &str), curves: &[Curve]) -> String {
    let names = if curves.len() > 1 { curves.len() } else { 0 };
    let mut out = opened((WIDTH, HEIGHT + NAME * names as f64), title);
    let most = |axis: fn(&(f64, f64)) -> f64| {
        let values = curves.iter().flat_map(|(_, points)| points.iter().map(axis));
        values.fold(0.0f64, f64::max).max(1e-9)
    };
    let (wide, high) = (most(|point| point.0), most(|point| point.1) * 1.02);
    let x = |value: f64| PLOT.0 + (PLOT.2 - PLOT.0) * value / wide;
    let y = |value: f64| PLOT.3 - (PLOT.3 - PLOT.1) * value / high;
    for mark in marks(wide) {
        line(&mut out, (x(mark), PLOT.1), (x(mark), PLOT.3));
        text(&mut out, (x(mark), PLOT.3 + 18.0), "middle", &shown(mark));
    }
    for mark in marks(high) {
        line(&mut out, (PLOT.0, y(mark)), (PLOT.2, y(mark)));
        text(&mut out, (PLOT.0 - 6.0, y(mark) + 4.0), "end", &shown(mark));
    }
    text(&mut out, ((PLOT.0 + PLOT.2) / 2.0, PLOT.3 + 38.0), "middle", &format!("{title}, {across}"));
    turned(&mut out, (14.0, (PLOT.1 + PLOT.3) / 2.0), up);
    for (index, (name, points)) in curves.iter().enumerate() {
        let places: Vec<String> = points.iter().map(|(a, b)| format!("{:.1},{:.1}", x(*a), y(*b))).collect();
        let (color, title) = (COLORS[index % COLORS.len()], escaped(name));
        let _ = writeln!(
            out,
            "<polyline class=\"curve\" stroke=\"{color}\" points=\"{}\"><title>{title}</title></polyline>",
            places.join(" ")
        );
        if index < names {
            let at = HEIGHT + NAME * index as f64;
            let _ = writeln!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{color}\"/>", PLOT.0, at - 4.0);
            text(&mut out, (PLOT.0 + 10.0, at), "start", name);
        }
    }
    format!("<figure>{}</figure>\n", closed(out))
}

/// Round values from 0 up to this one: four to ten of them.
fn marks(most: f64) -> Vec<f64> {
    let rough = most / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    (0..=(most / step) as usize).map(|mark| mark as f64 * step).collect()
}

fn shown(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::example;
    use super::*;
    use crate::cli::drawing::tests::elements;

    #[test]
    fn marks_are_round() {
        assert_eq!(marks(1.0), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(marks(470.0), [0.0, 100.0, 200.0, 300.0, 400.0]);
        assert_eq!((shown(0.6000000000000001), shown(400.0), shown(0.0)), ("0.6".into(), "400".into(), "0".into()));
    }

    #[test]
    fn every_curve_is_drawn_and_every_picture_is_well_formed() {
        let measured = example();
        let curve = distribution(measured.answers().map(|(_, answer)| answer.ttft).collect());
        assert_eq!(curve.len(), 3);
        assert!((curve[0].0 - 500.0).abs() < 1e-9 && curve[2].1 == 1.0);
        // 19 tokens in 6 seconds, in twenty spans of 0.3 s.
        let over_time = throughput(&measured);
        let tokens: f64 = over_time.iter().map(|(_, speed)| speed * 0.3).sum();
        assert!(over_time.len() == 20 && (tokens - 19.0).abs() < 1e-9, "{over_time:?}");
        for curves in
            [vec![("a & b".to_owned(), curve.clone()), ("c".to_owned(), curve)], vec![("empty".to_owned(), vec![])]]
        {
            let picture = figure("<Time>", ("ms", "part"), &curves);
            let svg = picture.trim_end().strip_prefix("<figure>").and_then(|rest| rest.strip_suffix("</figure>"));
            let found = elements(svg.expect("a figure"));
            assert_eq!(found.iter().filter(|name| *name == "polyline").count(), curves.len());
            let mut heights: Vec<&str> =
                picture.split(" y=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
            heights.sort_unstable();
            let lowest = &heights[heights.len() - 2..];
            assert!(curves.len() == 1 || lowest == ["300.0", "320.0"], "names are below everything else: {heights:?}");
        }
    }
}
