//! A profile for people. Pure.

use tokenrouter_core::theory::latency::Point;
use tokenrouter_core::theory::profile::{ModelProfile, Profile, Way};

/// A block for each model: where requests go, then latencies with their spread.
pub fn text(profile: &Profile) -> String {
    profile.models.iter().map(block).collect::<Vec<_>>().join("\n")
}

fn block(model: &ModelProfile) -> String {
    let ways = model.ways.iter().filter(|(_, way)| way.share > 0.0);
    // One standard error of a share that was counted.
    let error = |share: f64| match model.observations {
        0 => String::new(),
        _ if share >= 1.0 => String::new(),
        rows => format!(" +- {:.3}", (share * (1.0 - share) / rows as f64).sqrt()),
    };
    let way = |(name, way): (&String, &Way)| {
        format!("to {name} {:.3}{} ({:.2} tokens)", way.share, error(way.share), way.tokens)
    };
    let ways: Vec<String> = ways.map(way).collect();
    let source = match model.observations {
        0 => "as the algorithm expects; no prompt led here".to_owned(),
        rows => format!("from {rows} rows"),
    };
    let mut text = format!("{}: {}, {source}\n", model.name, ways.join(", "));
    text += &format!("{:>6} {:>6}  {:>20}  {:>20}  {:>6}\n", "rows", "tokens", "alone", "beside others", "slower");
    for point in &model.alone {
        let beside = model.beside.iter().find(|other| (other.rows, other.tokens) == (point.rows, point.tokens));
        let (shown, slower) = match beside {
            Some(other) => (time(other), format!("{:.2}", other.seconds / point.seconds)),
            None => ("-".into(), "-".into()),
        };
        text += &format!("{:>6} {:>6}  {:>20}  {shown:>20}  {slower:>6}\n", point.rows, point.tokens, time(point));
    }
    text
}

fn time(point: &Point) -> String {
    format!("{:.2} ms +- {:.0} %", 1e3 * point.seconds, 100.0 * point.spread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::theory::profile::VERSION;

    #[test]
    fn every_point_has_a_line() {
        let point = |rows, seconds| Point { rows, tokens: 1, seconds, spread: 0.1 };
        let model = ModelProfile {
            name: "small".into(),
            rows_max: 4,
            alone: vec![point(1, 0.010), point(2, 0.012)],
            beside: vec![point(1, 0.020), point(2, 0.018)],
            ways: [("large".to_owned(), Way { share: 0.2, tokens: 0.5 })].into(),
            observations: 40,
        };
        let text = text(&Profile { version: VERSION, models: vec![model] });
        assert!(text.starts_with("small: to large 0.200 +- 0.063 (0.50 tokens), from 40 rows\n"), "{text}");
        assert!(text.contains("10.00 ms +- 10 %") && text.contains("20.00 ms +- 10 %    2.00"), "{text}");
        assert_eq!(text.lines().count(), 4);
    }
}
