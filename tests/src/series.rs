//! One series of an answer to `GET /metrics`. Pure. Invariant: what is not there is a failed test, not a zero.

/// Its value, by its name and those of its labels that tell it from others: `name{label="value"}`.
///
/// # Panics
/// When no series or several fit: a failed test.
pub fn value(text: &str, series: &str) -> f64 {
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let wanted: Vec<&str> = labels.trim_end_matches('}').split_inclusive("\",").collect();
    let value = |line: &str| -> Option<f64> {
        let (labels, value) = line.strip_prefix(name).filter(|rest| rest.starts_with(['{', ' ']))?.rsplit_once(' ')?;
        let labels = format!(",{},", labels.trim_matches(['{', '}']));
        let fits = wanted.iter().all(|label| labels.contains(&format!(",{},", label.trim_end_matches(','))));
        fits.then(|| value.parse().expect("a number"))
    };
    let found: Vec<f64> = text.lines().filter_map(value).collect();
    assert_eq!(found.len(), 1, "{series} in\n{text}");
    found[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "a_total{x=\"1\",y=\"p,q\"} 3\na_total{x=\"2\",y=\"p,q\"} 4\na 5\na_b{max_x=\"1\"} 6\n";

    #[test]
    fn a_series_is_found_by_some_of_its_labels() {
        assert_eq!((value(TEXT, "a"), value(TEXT, "a_total{x=\"2\"}")), (5.0, 4.0));
        assert_eq!(value(TEXT, "a_total{y=\"p,q\",x=\"1\"}"), 3.0);
    }

    #[test]
    #[should_panic(expected = "a_b{x=")]
    fn what_is_not_there_is_told() {
        value(TEXT, "a_b{x=\"1\"}");
    }
}
