//! The problems of config/coder are right themselves: references pass and mistakes do not, answers follow from the
//! numbers in the question.

use super::code::{Sandbox, program};
use super::problems::{self, Check};
use serde::Deserialize;
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

/// What the lines hold besides the problem.
#[derive(Deserialize)]
struct Line {
    kind: String,
    question: String,
    expression: Option<String>,
    reference: Option<String>,
    broken: Option<String>,
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/coder/problems.jsonl")
}

fn lines() -> Vec<Line> {
    let text = std::fs::read_to_string(path()).expect("the problems are there");
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

#[test]
fn half_are_arithmetic_and_half_are_programs() {
    let lines = lines();
    let questions: HashSet<&str> = lines.iter().map(|line| line.question.as_str()).collect();
    assert_eq!((lines.len(), questions.len()), (80, 80));
    assert_eq!(lines.iter().filter(|line| line.expression.is_some()).count(), 40);
    assert_eq!(lines.iter().filter(|line| line.reference.is_some() && line.broken.is_some()).count(), 40);
    let kinds: BTreeSet<&str> = lines.iter().map(|line| line.kind.as_str()).collect();
    assert_eq!(kinds.len(), 7, "{kinds:?}");
}

#[test]
fn references_pass_and_mistakes_do_not() {
    let sandbox = Sandbox::open().expect("python3 is installed");
    let problems = problems::read(&path(), None).expect("problems");
    let mut programs = 0;
    for (problem, line) in problems.iter().zip(lines()) {
        let (Some(tests), Some(reference), Some(broken)) = (&problem.tests, line.reference, line.broken) else {
            continue;
        };
        for (source, expected) in [(reference, true), (broken, false)] {
            let answer = format!("Here it is:\n```python\n{source}\n```\n");
            assert_eq!(sandbox.passes(program(&answer), tests).expect("it is run"), expected, "{source}");
            programs += 1;
        }
    }
    assert_eq!(programs, 80);
}

#[test]
fn answers_follow_from_the_numbers_in_the_question() {
    let sandbox = Sandbox::open().expect("python3 is installed");
    let problems = problems::read(&path(), None).expect("problems");
    let mut answers = 0;
    for (problem, line) in problems.iter().zip(lines()) {
        let Some(expression) = line.expression else { continue };
        let test = |answer: &str| format!("assert abs({expression} - ({answer})) < 1e-9");
        let value = |answer: &str| sandbox.passes("", &test(answer)).expect("it is run");
        assert!(value(&problem.answer) && !value(&format!("{} + 1", problem.answer)), "{}", problem.question);
        let said = said(&problem.question);
        let used = digits(&expression);
        assert!(used.is_subset(&said), "{}: {expression} uses {:?}", problem.question, used.difference(&said));
        assert!(Check::LastNumber.matches(&format!("so 7 is wrong\n{}", problem.answer), &problem.answer));
        answers += 1;
    }
    assert_eq!(answers, 40);
}

fn digits(text: &str) -> BTreeSet<u32> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// Numbers that a question says, in digits or in words, and those that units stand for.
fn said(question: &str) -> BTreeSet<u32> {
    let words = [
        ("two", 2),
        ("twice", 2),
        ("half", 2),
        ("three", 3),
        ("thirds", 3),
        ("four", 4),
        ("quarters", 4),
        ("five", 5),
        ("weekday", 5),
        ("six", 6),
        ("nine", 9),
        ("minutes", 60),
        ("percent", 100),
        ("cents", 100),
    ];
    let lower = question.to_lowercase();
    let named = words.iter().filter(|(word, _)| lower.contains(word)).map(|(_, number)| *number);
    // One is the whole that shares are taken of.
    digits(question).into_iter().chain(named).chain([1]).collect()
}
