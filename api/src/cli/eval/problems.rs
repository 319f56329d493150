//! Problems and what counts as their answer. Pure but for reading the file. Invariant: a line that is not a problem is an
//! error naming its line, never skipped.

use crate::cli::CliError;
use clap::ValueEnum;
use serde::Deserialize;
use std::path::Path;

/// One line of a file of problems.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// What is asked.
    pub question: String,
    /// The right answer; a worked answer that ends in `#### 28` counts as `28`. Empty where none is known.
    pub answer: String,
    /// Python that raises nothing after the program in a right answer: such problems have no `answer`.
    pub tests: Option<String>,
}

#[derive(Deserialize)]
struct Line {
    question: String,
    answer: Option<serde_json::Value>,
    tests: Option<Vec<String>>,
}

/// Reads a file of problems; empty lines separate, nothing else is passed over.
pub fn read(path: &Path, limit: Option<u32>) -> Result<Vec<Problem>, CliError> {
    let usage = |message: String| CliError::Usage(format!("{}{message}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!(": cannot read the problems: {error}")))?;
    let mut problems = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |why: &str| {
            let form = "{\"question\": \"…\", \"answer\": \"28\"} or has \"tests\": [\"assert f(1) == 2\"] in the answer's place";
            usage(format!(":{}: {why}; each line is {form}", number + 1))
        };
        let line: Line = serde_json::from_str(line).map_err(|error| wrong(&error.to_string()))?;
        problems.push(problem(line).map_err(wrong)?);
    }
    if problems.is_empty() {
        return Err(usage(": holds no problem".into()));
    }
    problems.truncate(limit.map_or(usize::MAX, |limit| limit as usize));
    Ok(problems)
}

fn problem(Line { question, answer, tests }: Line) -> Result<Problem, &'static str> {
    let answer = match (answer, tests) {
        (None, Some(tests)) if tests.is_empty() => return Err("tests holds no line"),
        (None, Some(tests)) => return Ok(Problem { question, answer: String::new(), tests: Some(tests.join("\n")) }),
        (Some(serde_json::Value::String(text)), None) => text,
        (Some(serde_json::Value::Number(number)), None) => number.to_string(),
        (Some(_), None) => return Err("answer is neither a string nor a number"),
        (Some(_), Some(_)) => return Err("there are both answer and tests"),
        (None, None) => return Err("there is neither answer nor tests"),
    };
    Ok(Problem { question, answer: Check::Marked.answer(&answer).unwrap_or(answer), tests: None })
}

/// What of an answer's text is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Check {
    /// The number after the last ####
    #[default]
    Marked,
    /// The last number in the text
    LastNumber,
}

impl Check {
    /// Whether a text ends in the right answer.
    pub fn matches(self, text: &str, right: &str) -> bool {
        let right = number(right).unwrap_or_else(|| right.trim().to_owned());
        self.answer(text).is_some_and(|answer| answer == right)
    }

    /// The answer in a text, in one spelling.
    fn answer(self, text: &str) -> Option<String> {
        match self {
            Check::Marked => number(text.rsplit_once("####")?.1.trim_start().lines().next()?),
            Check::LastNumber => numbers(text).pop(),
        }
    }
}

/// The only number of a text such as `28`, `$1,250.00` or `28 roses`, in one spelling.
fn number(text: &str) -> Option<String> {
    let mut found = numbers(text);
    if found.len() == 1 { found.pop() } else { None }
}

/// All decimal numbers of a text: signs kept, thousands separators and trailing zeros dropped.
fn numbers(text: &str) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    let digit = |at: usize| characters.get(at).is_some_and(char::is_ascii_digit);
    let mut found = Vec::new();
    let mut at = 0;
    while at < characters.len() {
        if !digit(at) {
            at += 1;
            continue;
        }
        // A minus that follows a number or a word is an operator or a hyphen.
        let before = at.checked_sub(2).and_then(|before| characters.get(before));
        let negative = at > 0 && characters[at - 1] == '-' && !before.is_some_and(|c| c.is_alphanumeric());
        let mut spelled = String::new();
        let mut fraction = false;
        while at < characters.len() {
            match characters[at] {
                c if c.is_ascii_digit() => spelled.push(c),
                ',' if !fraction && digit(at + 1) && digit(at + 2) && digit(at + 3) && !digit(at + 4) => {}
                '.' if !fraction && digit(at + 1) => {
                    fraction = true;
                    spelled.push('.');
                }
                _ => break,
            }
            at += 1;
        }
        if fraction {
            spelled.truncate(spelled.trim_end_matches('0').trim_end_matches('.').len());
        }
        let whole = spelled.trim_start_matches('0');
        let spelled = if whole.is_empty() || whole.starts_with('.') { format!("0{whole}") } else { whole.to_owned() };
        found.push(if negative && spelled != "0" { format!("-{spelled}") } else { spelled });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_spelling() {
        for (text, expected) in [
            ("", vec![]),
            ("28", vec!["28"]),
            ("007 and 0", vec!["7", "0"]),
            ("$1,250.00.", vec!["1250"]),
            ("1,25", vec!["1", "25"]),
            ("-3 but 5-3 and x-4", vec!["-3", "5", "3", "4"]),
            ("0.50 1.05", vec!["0.5", "1.05"]),
            ("-0", vec!["0"]),
        ] {
            assert_eq!(numbers(text), expected, "{text}");
        }
    }

    #[test]
    fn answers_are_compared_exactly() {
        for (check, text, right, expected) in [
            (Check::Marked, "43 + 26 = 69\n#### 28", "28", true),
            (Check::Marked, "#### 28", "28.0", true),
            (Check::Marked, "#### 1,028", "1028", true),
            (Check::Marked, "#### 27\n#### 28", "28", true),
            (Check::Marked, "#### 28\n", "28", true),
            (Check::Marked, "#### 28 29", "28", false),
            (Check::Marked, "#### 280", "28", false),
            (Check::Marked, "the answer is 28", "28", false),
            (Check::Marked, "####", "28", false),
            (Check::LastNumber, "the answer is 28.", "28", true),
            (Check::LastNumber, "28 or 29", "28", false),
        ] {
            assert_eq!(check.matches(text, right), expected, "{text} {right}");
        }
    }

    #[test]
    fn files_of_problems() {
        let path = std::env::temp_dir().join(format!("tokenrouter-problems-{}.jsonl", std::process::id()));
        let read_text = |text: &str| {
            std::fs::write(&path, text).expect("written");
            read(&path, Some(2)).map_err(|error| error.to_string())
        };
        let good = read_text(
            "{\"question\":\"a\",\"answer\":\"x = 3\\n#### 3\"}\n\n{\"question\":\"b\",\"answer\":4,\"id\":1}\n{\"question\":\"c\",\"answer\":\"5\"}\n",
        );
        let answers: Vec<String> = good.expect("good").into_iter().map(|problem| problem.answer).collect();
        assert_eq!(answers, ["3", "4"]);
        let tested = read_text("{\"question\":\"a\",\"tests\":[\"assert f(1)\",\"assert f(2)\"]}\n").expect("good");
        let tests = Some("assert f(1)\nassert f(2)".to_owned());
        assert_eq!(tested, [Problem { question: "a".into(), answer: String::new(), tests }]);
        for (text, part) in [
            ("", ": holds no problem"),
            ("{\"question\":\"a\",\"answer\":\"1\"}\nnonsense\n", ":2: "),
            ("{\"question\":\"a\"}\n", ":1: there is neither answer nor tests"),
            ("{\"question\":\"a\",\"answer\":1,\"tests\":[\"x\"]}\n", "both answer and tests"),
            ("{\"question\":\"a\",\"tests\":[]}\n", "tests holds no line"),
            ("{\"question\":\"a\",\"tests\":\"x\"}\n", ":1: invalid type"),
            ("{\"question\":\"a\",\"answer\":[]}\n", "neither a string nor a number"),
        ] {
            let error = read_text(text).expect_err(text);
            assert!(error.contains(part) && error.contains("tokenrouter-problems"), "{error}");
        }
        std::fs::remove_file(&path).expect("removed");
        assert!(read(&path, None).is_err());
    }
}
