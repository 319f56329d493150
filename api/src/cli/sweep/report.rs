//! What a sweep found, as CSV and as JSON. Pure. Invariant: both have a row for every row of the table, in its order.

use super::grid::real;
use crate::cli::eval::report::{self, Row};
use serde_json::{Number, Value as Json, json};

/// The large model of the pair.
pub const LARGE: usize = 1;

/// One row of a sweep.
#[derive(Clone, Debug)]
pub struct Point {
    /// Which curve it belongs to: the name of its series, or what the row is.
    pub series: String,
    /// The parameter that was set and its value; none for rows that stand alone.
    pub setting: Option<(String, Number)>,
    /// What was measured.
    pub row: Row,
}

impl Point {
    /// Share of generated tokens that the large model made, 0 to 1.
    pub fn large_share(&self) -> f64 {
        self.row.share(LARGE)
    }
}

/// The rows of the points.
pub fn rows(points: &[Point]) -> Vec<Row> {
    points.iter().map(|point| point.row.clone()).collect()
}

/// The points as one JSON object: the object of `eval` with `algorithm`, `param` and `value` in each row.
pub fn json(points: &[Point], models: &[String]) -> Json {
    let mut object = report::json(&rows(points), models);
    for (row, point) in object["rows"].as_array_mut().into_iter().flatten().zip(points) {
        row["algorithm"] = json!(point.series);
        row["param"] = json!(point.setting.as_ref().map(|(param, _)| param));
        row["value"] = json!(point.setting.as_ref().map(|(_, value)| value));
    }
    object
}

/// The points as CSV (RFC 4180) with a line of names; shares and accuracy (with the ends of
/// its 95 % interval) are within 0 and 1.
pub fn csv(points: &[Point]) -> String {
    let mut text = String::from(
        "algorithm,param,value,accuracy,accuracy_low,accuracy_high,right,total,failed,tokens,large_tokens,large_share,\
         hops_per_problem,tokens_per_s,seconds\n",
    );
    for point in points {
        let Point { series, setting, row } = point;
        let (param, value) = setting
            .as_ref()
            .map_or((String::new(), String::new()), |(param, value)| (field(param), real(value).to_string()));
        let (low, high) = row.interval();
        text.push_str(&format!(
            "{},{param},{value},{:.4},{low:.4},{high:.4},{},{},{},{},{},{:.4},{:.2},{:.0},{:.3}\n",
            field(series),
            row.accuracy(),
            row.right,
            row.total,
            row.failed,
            row.tokens(),
            row.by_model[LARGE],
            point.large_share(),
            row.hops_per_problem(),
            row.tokens_per_second(),
            row.seconds,
        ));
    }
    text
}

/// A field of a CSV file, quoted where it must be.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A point of 100 tokens and 10 problems.
    pub fn point(series: &str, setting: Option<(&str, f64)>, (right, large): (u32, u64)) -> Point {
        let mut row = Row::new(series.to_owned(), 2);
        (row.right, row.total, row.by_model, row.hops, row.seconds) = (right, 10, vec![100 - large, large], 15, 2.0);
        let setting = setting.map(|(param, value)| (param.to_owned(), Number::from_f64(value).expect("finite")));
        Point { series: series.to_owned(), setting, row }
    }

    #[test]
    fn csv_has_a_line_for_each_point() {
        let points =
            [point("r_stitch", Some(("threshold", 0.05)), (9, 8)), point("large, \"big\" alone", None, (10, 100))];
        let text = csv(&points);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].split(',').count(), 15);
        assert_eq!(lines[1], "r_stitch,threshold,0.05,0.9000,0.5958,0.9821,9,10,0,100,8,0.0800,1.50,50,2.000");
        assert_eq!(
            lines[2],
            "\"large, \"\"big\"\" alone\",,,1.0000,0.7225,1.0000,10,10,0,100,100,1.0000,1.50,50,2.000"
        );
    }

    #[test]
    fn json_rows_carry_their_setting() {
        let points = [point("r_stitch", Some(("threshold", 0.05)), (9, 8)), point("large alone", None, (10, 100))];
        let object = json(&points, &["small".to_owned(), "large".to_owned()]);
        let rows = object["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 2);
        assert_eq!((&rows[0]["algorithm"], &rows[0]["param"]), (&json!("r_stitch"), &json!("threshold")));
        assert_eq!((rows[0]["value"].as_f64(), rows[0]["share"]["large"].as_f64()), (Some(0.05), Some(0.08)));
        assert_eq!((&rows[1]["param"], &rows[1]["value"]), (&Json::Null, &Json::Null));
    }
}
