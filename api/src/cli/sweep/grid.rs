//! What a sweep runs: algorithms, the parameter that changes, its values. Pure. Invariant: what cannot be read is refused
//! with the form that would be right.

use crate::cli::{CliError, options};
use serde_json::{Number, Value as Json};

/// Values of one parameter in a range at most.
const VALUES_MAX: usize = 1000;
/// Digits that values between the ends of a range keep.
const DIGITS: i32 = 4;

/// Values of a parameter, in the order they are run.
#[derive(Clone, Debug, PartialEq)]
pub struct Values(pub Vec<Number>);

/// Reads `0.01,0.02,0.05` or a range `LOW:HIGH:COUNT` or `LOW:HIGH:COUNT:log`, both ends included.
///
/// # Errors
/// What is wrong with the text.
pub fn values(text: &str) -> Result<Values, String> {
    if text.contains(':') { range(text) } else { text.split(',').map(number).collect::<Result<_, _>>().map(Values) }
}

fn number(text: &str) -> Result<Number, String> {
    let text = text.trim();
    let whole = text.parse::<i64>().ok().map(Number::from);
    let real = || text.parse::<f64>().ok().and_then(Number::from_f64);
    whole.or_else(real).ok_or_else(|| format!("`{text}` is not a number; write 0.01,0.02,0.05 or 0.001:0.3:12:log"))
}

fn range(text: &str) -> Result<Values, String> {
    let form = || "a range is LOW:HIGH:COUNT or LOW:HIGH:COUNT:log, as in 0.001:0.3:12:log".to_owned();
    let parts: Vec<&str> = text.split(':').collect();
    let (ends, count, log) = match parts[..] {
        [low, high, count] => ((low, high), count, false),
        [low, high, count, "log"] => ((low, high), count, true),
        _ => return Err(form()),
    };
    let (first, last) = (number(ends.0)?, number(ends.1)?);
    let (low, high) = (real(&first), real(&last));
    let count: usize = count.trim().parse().map_err(|_| form())?;
    if !(2..=VALUES_MAX).contains(&count) {
        return Err(format!("a range has 2 to {VALUES_MAX} values, not {count}"));
    }
    if low >= high {
        return Err(format!("a range goes upwards, but {low} is not below {high}"));
    }
    if log && low <= 0.0 {
        return Err(format!("a range on a log scale starts above 0, not at {low}"));
    }
    let step = |index: usize| index as f64 / (count - 1) as f64;
    let between = |at: f64| if log { low * (high / low).powf(at) } else { low + (high - low) * at };
    let inner = (1..count - 1).filter_map(|index| Number::from_f64(short(between(step(index)))));
    Ok(Values(std::iter::once(first).chain(inner).chain([last]).collect()))
}

/// The number with [`DIGITS`] digits: values are there to be read and typed again.
fn short(value: f64) -> f64 {
    if value == 0.0 {
        return 0.0;
    }
    let decimals = (DIGITS - 1 - value.abs().log10().floor() as i32).clamp(0, 300);
    format!("{value:.*}", decimals as usize).parse().unwrap_or(value)
}

/// A value as a float; numbers of a JSON text always have one.
pub fn real(number: &Number) -> f64 {
    number.as_f64().unwrap_or(f64::NAN)
}

/// One algorithm with a parameter that takes several values.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What its rows and its line are called: the algorithm, or all that sets it apart where that runs several times.
    pub name: String,
    /// Name of the algorithm.
    pub algorithm: String,
    /// Its other parameters, on top of the launch file's if that has the same algorithm.
    pub fixed: Vec<(String, Json)>,
    /// The parameter.
    pub param: String,
    /// Its values.
    pub values: Vec<Number>,
}

/// What is run when no algorithm is named: the default one and the null router.
pub fn usual() -> Result<Vec<Series>, CliError> {
    let of = |algorithm: &str, param: &str, range: &str| -> Result<Series, CliError> {
        let Values(values) = values(range).map_err(CliError::Usage)?;
        let (name, param) = (algorithm.to_owned(), param.to_owned());
        Ok(Series { name: name.clone(), algorithm: name, fixed: Vec::new(), param, values })
    };
    Ok(vec![of("r_stitch", "threshold", "0.02:0.4:10:log")?, of("bernoulli", "p", "0.02:0.64:6:log")?])
}

/// Puts `--algorithm`, `--param` and `--values` together: the first of each, the second of each and so on.
///
/// # Errors
/// Their numbers differ, or the text behind an algorithm's colon is wrong.
pub fn series(algorithms: &[String], params: &[String], values: &[Values]) -> Result<Vec<Series>, CliError> {
    let counts = (algorithms.len(), params.len(), values.len());
    if counts.0 != counts.1 || counts.0 != counts.2 {
        return Err(CliError::Usage(format!(
            "{} --algorithm, {} --param and {} --values are given; each algorithm takes one of each, in the same order",
            counts.0, counts.1, counts.2
        )));
    }
    let one = |((text, param), values): ((&String, &String), &Values)| {
        let (algorithm, fixed) = match text.split_once(':') {
            Some((name, fixed)) => (name, options::params(fixed).map_err(|_| form(text))?),
            None => (text.as_str(), Vec::new()),
        };
        let same = |other: &&String| other.split(':').next() == Some(algorithm);
        let name = if algorithms.iter().filter(same).count() > 1 { text.as_str() } else { algorithm }.to_owned();
        Ok(Series { name, algorithm: algorithm.to_owned(), fixed, param: param.clone(), values: values.0.clone() })
    };
    algorithms.iter().zip(params).zip(values).map(one).collect()
}

fn form(text: &str) -> CliError {
    CliError::Usage(format!("--algorithm {text}: write NAME or NAME:KEY=VALUE, as in r2r:head=heads/r2r"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reals(text: &str) -> Vec<f64> {
        values(text).unwrap_or_else(|error| panic!("{text}: {error}")).0.iter().map(real).collect()
    }

    #[test]
    fn lists_and_ranges() {
        assert_eq!(reals("0.005, 0.02,1"), [0.005, 0.02, 1.0]);
        assert_eq!(reals("-0.5"), [-0.5]);
        assert_eq!(reals("0:1:5"), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(reals("0.001:1:4:log"), [0.001, 0.01, 0.1, 1.0]);
        assert_eq!(reals("1:3:2"), [1.0, 3.0]);
        let Values(whole) = values("3,4.0").expect("numbers");
        assert_eq!((whole[0].as_i64(), whole[1].as_i64()), (Some(3), None), "integers stay integers");
        let twelve = reals("0.001:0.3:12:log");
        assert_eq!((twelve.len(), twelve[0], twelve[11]), (12, 0.001, 0.3));
        assert!(twelve.windows(2).all(|two| two[0] < two[1]));
        // Even steps in the logarithm, up to the digits that are kept.
        let ratio = (0.3f64 / 0.001).powf(1.0 / 11.0);
        assert!(twelve.windows(2).all(|two| (two[1] / two[0] / ratio - 1.0).abs() < 2e-3), "{twelve:?}");
        assert_eq!(short(0.000_123_456), 0.000_123_5);
    }

    #[test]
    fn wrong_values_say_what_is_right() {
        for (text, part) in [
            ("", "is not a number"),
            ("0.1,x", "`x` is not a number"),
            ("nan", "is not a number"),
            ("0.1:0.2", "LOW:HIGH:COUNT"),
            ("0.1:0.2:3:lin", "LOW:HIGH:COUNT"),
            ("0.1:0.2:many", "LOW:HIGH:COUNT"),
            ("0.1:0.2:1", "2 to 1000 values, not 1"),
            ("0.2:0.1:3", "0.2 is not below 0.1"),
            ("0:1:3:log", "starts above 0"),
        ] {
            let error = values(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn options_are_put_together_in_order() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let two = [values("0.1").expect("a list"), values("0.2,0.3").expect("a list")];
        let read = series(&texts(&["r_stitch", "r2r:head=heads/a"]), &texts(&["threshold", "threshold"]), &two);
        let read = read.expect("two series");
        assert_eq!((read[0].algorithm.as_str(), read[0].values.len()), ("r_stitch", 1));
        assert_eq!((read[1].algorithm.as_str(), read[1].values.len()), ("r2r", 2));
        assert_eq!(read[1].fixed, [("head".to_owned(), Json::from("heads/a"))]);
        let names = |given: &[&str]| -> Vec<String> {
            let read = series(&texts(given), &texts(&["threshold", "threshold"]), &two).expect("two series");
            read.into_iter().map(|series| series.name).collect()
        };
        assert_eq!(names(&["r_stitch", "r2r:head=a"]), ["r_stitch", "r2r"]);
        assert_eq!(names(&["r2r:head=a", "r2r:head=b"]), ["r2r:head=a", "r2r:head=b"]);
        let error = series(&texts(&["r2r:head"]), &texts(&["threshold"]), &two[..1]).expect_err("no value");
        assert!(error.to_string().contains("NAME:KEY=VALUE"), "{error}");
        let error = series(&texts(&["r2r"]), &[], &two).expect_err("numbers differ");
        assert!(error.to_string().contains("1 --algorithm, 0 --param and 2 --values"), "{error}");
        assert_eq!(usual().expect("the usual series").len(), 2);
    }
}
