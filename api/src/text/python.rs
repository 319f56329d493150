//! The two pieces of Python's standard library that chat templates rely on: `json.dumps` and `strftime`.
//! Owner: the template environment. Invariant: pure functions; the time comes from the caller.

use serde_json::Value as Json;

/// `json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)`.
pub fn json_dumps(value: &Json, indent: Option<usize>, sort_keys: bool) -> String {
    let mut out = String::new();
    Writer { out: &mut out, indent, sort_keys }.value(value, 1);
    out
}

struct Writer<'a> {
    out: &'a mut String,
    indent: Option<usize>,
    sort_keys: bool,
}

impl Writer<'_> {
    fn value(&mut self, value: &Json, depth: usize) {
        match value {
            Json::Array(values) if values.is_empty() => self.out.push_str("[]"),
            Json::Object(fields) if fields.is_empty() => self.out.push_str("{}"),
            Json::Array(values) => {
                self.out.push('[');
                for (index, value) in values.iter().enumerate() {
                    self.separate(index, depth);
                    self.value(value, depth + 1);
                }
                self.close(']', depth);
            }
            Json::Object(fields) => {
                let mut fields: Vec<(&String, &Json)> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by_key(|&(key, _)| key);
                }
                self.out.push('{');
                for (index, (key, value)) in fields.into_iter().enumerate() {
                    self.separate(index, depth);
                    self.out.push_str(&Json::from(key.as_str()).to_string());
                    self.out.push_str(": ");
                    self.value(value, depth + 1);
                }
                self.close('}', depth);
            }
            scalar => self.out.push_str(&scalar.to_string()),
        }
    }

    fn separate(&mut self, index: usize, depth: usize) {
        match (index, self.indent) {
            (0, None) => {}
            (_, None) => self.out.push_str(", "),
            (index, Some(width)) => {
                self.out.push_str(if index == 0 { "\n" } else { ",\n" });
                self.out.push_str(&" ".repeat(width * depth));
            }
        }
    }

    fn close(&mut self, bracket: char, depth: usize) {
        if let Some(width) = self.indent {
            self.out.push('\n');
            self.out.push_str(&" ".repeat(width * (depth - 1)));
        }
        self.out.push(bracket);
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `datetime.utcfromtimestamp(seconds).strftime(format)` in the C locale, for the directives that templates use.
///
/// # Errors
/// A directive that is not known.
pub fn strftime(seconds: i64, format: &str) -> Result<String, String> {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (month_name, weekday) = (MONTHS[month as usize - 1], DAYS[(days + 4).rem_euclid(7) as usize]);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        // `%-d` is glibc's `%d` without padding.
        let (plain, directive) = match characters.next() {
            Some('-') => (true, characters.next()),
            directive => (false, directive),
        };
        let two = |number: i64| if plain { number.to_string() } else { format!("{number:02}") };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year.rem_euclid(100)),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => {
                if plain {
                    day.to_string()
                } else {
                    format!("{day:2}")
                }
            }
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => return Err(format!("strftime_now: directive %{other} is not supported")),
            None => return Err("strftime_now: the format ends with %".to_owned()),
        });
    }
    Ok(out)
}

/// Year, month (1 to 12) and day (1 to 31) of a day counted from 1970-01-01 in the Gregorian calendar.
///
/// Days are counted from 0000-03-01, so that the leap day ends a year (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dumps_like_python() {
        let value = json!({ "b": [1, 2.5, null, true], "a": { "é<>&'": "\n\"" }, "e": [], "o": {} });
        assert_eq!(
            json_dumps(&value, None, false),
            r#"{"b": [1, 2.5, null, true], "a": {"é<>&'": "\n\""}, "e": [], "o": {}}"#
        );
        assert_eq!(
            json_dumps(&json!({ "b": 1, "a": [2] }), Some(2), true),
            "{\n  \"a\": [\n    2\n  ],\n  \"b\": 1\n}"
        );
    }

    #[test]
    fn dates() {
        let all = |seconds| strftime(seconds, "%Y-%m-%d %H:%M:%S %a %d %b %Y %-d %B %I %p %j".trim_end_matches(" %j"));
        assert_eq!(all(0).unwrap(), "1970-01-01 00:00:00 Thu 01 Jan 1970 1 January 12 AM");
        assert_eq!(all(951_826_154).unwrap(), "2000-02-29 12:09:14 Tue 29 Feb 2000 29 February 12 PM");
        assert_eq!(all(-1).unwrap(), "1969-12-31 23:59:59 Wed 31 Dec 1969 31 December 11 PM");
        assert_eq!(strftime(1_735_689_600, "%F %T %e %y%%").unwrap(), "2025-01-01 00:00:00  1 25%");
        assert!(strftime(0, "%Q").unwrap_err().contains("%Q"));
        assert!(strftime(0, "%").is_err());
    }

    #[test]
    fn every_day_of_a_thousand_years_follows_the_one_before() {
        let start = -200_000;
        let mut before = civil(start);
        for day in start + 1..start + 366_000 {
            let (year, month, date) = civil(day);
            let next = if date > 1 { before.2 + 1 == date && before.1 == month } else { before.1 % 12 + 1 == month };
            assert!(next && (year == before.0 || (month, date) == (1, 1)), "{before:?} then {:?}", (year, month, date));
            assert!((28..=31).contains(&before.2) || date > 1);
            before = (year, month, date);
        }
    }
}
