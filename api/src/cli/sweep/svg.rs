//! The picture of a sweep: accuracy over the share of large tokens, one line for each algorithm. Pure. Invariant: the
//! text is well-formed XML that needs nothing from outside, and its colours follow the reader's light or dark scheme.

use super::report::Point;
use std::fmt::Write;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 460.0;
/// Left, top, right and bottom edge of the plot.
const PLOT: (f64, f64, f64, f64) = (64.0, 24.0, 600.0, 400.0);
/// Colours that can be told apart on white and on black, and by most people with a colour deficiency.
const COLORS: [&str; 10] =
    ["#0e86d4", "#d9622b", "#2b9a66", "#b15ac7", "#b8860b", "#d6466f", "#5f8ea0", "#8c6d46", "#5a63d8", "#7d8590"];
/// Marks on the axis of shares, in percent. Its scale is the square root: what matters happens below 10 %.
const SHARES: [u32; 8] = [0, 1, 5, 10, 25, 50, 75, 100];
const STYLE: &str = "<style>:root{--paper:#fff;--ink:#1f2328;--grid:#d5d9de}\
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--grid:#30363d}}\
.paper{fill:var(--paper)}text{fill:var(--ink);font:13px system-ui,sans-serif}\
.grid{stroke:var(--grid);stroke-width:1}.curve{fill:none;stroke-width:2}</style>";

fn x(share: f64) -> f64 {
    PLOT.0 + (PLOT.2 - PLOT.0) * share.clamp(0.0, 1.0).sqrt()
}

fn y(accuracy: f64) -> f64 {
    PLOT.3 - (PLOT.3 - PLOT.1) * accuracy.clamp(0.0, 1.0)
}

/// Draws the points; `large` is the name of the large model.
pub fn picture(points: &[Point], large: &str) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n\
         <title>Accuracy over the share of tokens from {}</title>\n{STYLE}\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        escaped(large)
    );
    out.push_str(&axes(large));
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.series.as_str()) {
            names.push(&point.series);
        }
    }
    for (index, name) in names.iter().enumerate() {
        let mut own: Vec<&Point> = points.iter().filter(|point| point.series == *name).collect();
        own.sort_by(|a, b| a.large_share().total_cmp(&b.large_share()));
        out.push_str(&curve(index, name, &own));
    }
    out.push_str("</svg>\n");
    out
}

fn axes(large: &str) -> String {
    let mut out = String::new();
    for percent in SHARES {
        let at = x(f64::from(percent) / 100.0);
        line(&mut out, (at, PLOT.1), (at, PLOT.3));
        text(&mut out, (at, PLOT.3 + 20.0), "middle", &percent.to_string());
    }
    for percent in (0..=100u32).step_by(20) {
        let at = y(f64::from(percent) / 100.0);
        line(&mut out, (PLOT.0, at), (PLOT.2, at));
        text(&mut out, (PLOT.0 - 8.0, at + 4.0), "end", &percent.to_string());
    }
    let label = format!("tokens from {large}, % (square-root scale)");
    text(&mut out, ((PLOT.0 + PLOT.2) / 2.0, PLOT.3 + 46.0), "middle", &label);
    let middle = (PLOT.1 + PLOT.3) / 2.0;
    let turned = format!("<text transform=\"translate(18 {middle:.1}) rotate(-90)\" text-anchor=\"middle\">");
    let _ = writeln!(out, "{turned}problems answered right, %</text>");
    out
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(out, "<line class=\"grid\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(text));
}

/// Line, dots and legend of one series; a dot says its setting when pointed at.
fn curve(index: usize, name: &str, points: &[&Point]) -> String {
    let color = COLORS[index % COLORS.len()];
    let mut out = String::new();
    let place = |point: &Point| (x(point.large_share()), y(point.row.accuracy()));
    if points.len() > 1 {
        let places: Vec<String> =
            points.iter().map(|point| place(point)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(out, "<polyline class=\"curve\" stroke=\"{color}\" points=\"{}\"/>", places.join(" "));
    }
    for point in points {
        let (x, y) = place(point);
        let (right, share) = (100.0 * point.row.accuracy(), 100.0 * point.large_share());
        let title = escaped(&point.row.title);
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{color}\">\
             <title>{title}: {right:.1} % right, {share:.1} % large</title></circle>"
        );
    }
    let at = PLOT.1 + 14.0 + 22.0 * index as f64;
    let _ = writeln!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{color}\"/>", PLOT.2 + 30.0, at - 4.0);
    text(&mut out, (PLOT.2 + 44.0, at), "start", name);
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::point;
    use super::*;

    /// Checks tags, attributes and entities of XML without comments or declarations; returns the names of all elements.
    fn elements(xml: &str) -> Vec<String> {
        let (mut open, mut all) = (Vec::new(), Vec::new());
        for part in xml.trim().split('<').skip(1) {
            let (tag, text) = part.split_once('>').unwrap_or_else(|| panic!("`<{part}` is not closed"));
            for (at, _) in part.match_indices('&') {
                assert!(
                    ["&amp;", "&lt;", "&gt;", "&quot;"].iter().any(|entity| part[at..].starts_with(entity)),
                    "{part}"
                );
            }
            assert!(!text.contains('>') && tag.matches('"').count().is_multiple_of(2), "{part}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "{part}");
                continue;
            }
            let name = tag.trim_end_matches('/').split_whitespace().next().expect("a name").to_owned();
            if !tag.ends_with('/') {
                open.push(name.clone());
            }
            all.push(name);
        }
        assert_eq!(open, Vec::<String>::new(), "elements that stay open");
        all
    }

    #[test]
    fn the_picture_is_well_formed() {
        let points = [
            point("r_stitch", Some(("threshold", 0.1)), (9, 8)),
            point("r_stitch", Some(("threshold", 0.01)), (10, 40)),
            point("<\"big\" & large>", None, (10, 100)),
        ];
        let svg = picture(&points, "a & b");
        let all = elements(&svg);
        let count = |name: &str| all.iter().filter(|found| *found == name).count();
        assert_eq!((all[0].as_str(), count("polyline")), ("svg", 1));
        assert_eq!(count("circle"), 3 + 2, "every point and every name in the legend");
        assert!(svg.contains("&lt;&quot;big&quot; &amp; large&gt;"));
        assert!(svg.contains("prefers-color-scheme:dark"));
        assert_eq!(elements(&picture(&[], "none")).iter().filter(|name| *name == "circle").count(), 0);
    }

    #[test]
    fn points_lie_where_the_axes_say() {
        assert_eq!((x(0.0), x(0.25), x(1.0)), (PLOT.0, (PLOT.0 + PLOT.2) / 2.0, PLOT.2));
        assert_eq!((y(0.0), y(1.0)), (PLOT.3, PLOT.1));
        let svg = picture(&[point("one", None, (10, 25))], "large");
        assert!(svg.contains(&format!("<circle cx=\"{:.1}\" cy=\"{:.1}\"", x(0.25), y(1.0))), "{svg}");
        // A line runs from left to right, whatever the order of the values.
        let points = [point("a", Some(("p", 0.5)), (9, 64)), point("a", Some(("p", 0.1)), (1, 4))];
        let expected = format!("points=\"{:.1},{:.1} {:.1},{:.1}\"", x(0.04), y(0.1), x(0.64), y(0.9));
        assert!(picture(&points, "large").contains(&expected));
    }
}
