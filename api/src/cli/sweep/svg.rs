//! The picture of a sweep: accuracy over the share of large tokens, one line for each algorithm. Pure. Invariant: the
//! text is well-formed XML that needs nothing from outside, and its colours follow the reader's light or dark scheme.

use super::report::Point;
use crate::cli::drawing::{COLORS, closed, escaped, line, opened, text, turned};
use std::fmt::Write;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 460.0;
/// Left, top, right and bottom edge of the plot.
const PLOT: (f64, f64, f64, f64) = (64.0, 24.0, 600.0, 400.0);
/// Marks on the axis of shares, in percent. Its scale is the square root: what matters happens below 10 %.
const SHARES: [u32; 8] = [0, 1, 5, 10, 25, 50, 75, 100];
fn x(share: f64) -> f64 {
    PLOT.0 + (PLOT.2 - PLOT.0) * share.clamp(0.0, 1.0).sqrt()
}

fn y(accuracy: f64) -> f64 {
    PLOT.3 - (PLOT.3 - PLOT.1) * accuracy.clamp(0.0, 1.0)
}

/// Draws the points; `large` is the name of the large model.
pub fn picture(points: &[Point], large: &str) -> String {
    let mut out = opened((WIDTH, HEIGHT), &format!("Accuracy over the share of tokens from {large}"));
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
    closed(out)
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
    turned(&mut out, (18.0, middle), "problems answered right, %");
    out
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

#[cfg(test)]
mod tests {
    use super::super::report::tests::point;
    use super::*;
    use crate::cli::drawing::tests::elements;

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
