//! Reads a JSON object field by field. Owner: the request types. Invariant: a field is either taken by name or named in
//! an error; `finish` refuses what nobody took, so nothing a client sends is ignored by accident.

use crate::http::errors::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use tokenrouter_core::ids::TokenId;

/// The fields of a JSON object that nobody has read yet. `null` counts as absent, as in OpenAI's clients.
pub struct Fields {
    map: Map<String, Value>,
    at: String,
    known: Vec<&'static str>,
}

impl Fields {
    /// The fields of `value`; `at` is its path inside the request (empty for the body itself).
    ///
    /// # Errors
    /// 400 when it is not an object.
    pub fn of(value: Value, at: impl Into<String>) -> Result<Self, ApiError> {
        let at = at.into();
        match value {
            Value::Object(map) => Ok(Fields { map, at, known: Vec::new() }),
            other if at.is_empty() => {
                Err(ApiError::request(format!("the body must be an object, not {}", kind(&other))))
            }
            other => Err(wrong_type(&at, "an object", &other)),
        }
    }

    /// Path of a field for messages: `messages[2].content`.
    pub fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    /// Takes a field whatever its type; `None` when absent or null.
    pub fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        #[cfg(test)]
        taken::note(self.path(name));
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a text.
    ///
    /// # Errors
    /// 400 naming the field when it has another type.
    pub fn text(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// Takes a text that must be there.
    ///
    /// # Errors
    /// 400 naming the field when it is absent or has another type.
    pub fn required_text(&mut self, name: &'static str) -> Result<String, ApiError> {
        let text = self.text(name)?;
        text.ok_or_else(|| ApiError::field(self.path(name), format!("{name} is missing; send a string")))
    }

    /// Takes a truth value.
    ///
    /// # Errors
    /// 400 naming the field when it has another type.
    pub fn flag(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_type(&self.path(name), "true or false", &other)),
        }
    }

    /// Takes a number inside `range`.
    ///
    /// # Errors
    /// 400 naming the field when it has another type or lies outside.
    pub fn number(&mut self, name: &'static str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let path = self.path(name);
        let number = value.as_f64().ok_or_else(|| wrong_type(&path, "a number", &value))?;
        if !range.contains(&number) {
            return Err(outside(&path, &value, range.start(), range.end()));
        }
        Ok(Some(number as f32))
    }

    /// Takes a whole number inside `range`.
    ///
    /// # Errors
    /// 400 naming the field when it has another type or lies outside.
    pub fn integer(&mut self, name: &'static str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        whole(&self.path(name), &value, range).map(Some)
    }

    /// Takes a whole number from 1 up to what a position can hold.
    ///
    /// # Errors
    /// 400 naming the field when it has another type or lies outside.
    pub fn count(&mut self, name: &'static str) -> Result<Option<u32>, ApiError> {
        let count = self.integer(name, 1..=i64::from(i32::MAX))?;
        Ok(count.map(|count| u32::try_from(count).unwrap_or(u32::MAX)))
    }

    /// Takes a field that only its neutral values are accepted for.
    ///
    /// # Errors
    /// 400 naming the field and saying `why` when the value is not neutral.
    pub fn neutral(&mut self, name: &'static str, neutral: fn(&Value) -> bool, why: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !neutral(&value) => Err(ApiError::unsupported(self.path(name), why)),
            _ => Ok(()),
        }
    }

    /// Refuses whatever was not taken.
    ///
    /// # Errors
    /// 400 naming the first field left, with the nearest known name.
    pub fn finish(self) -> Result<(), ApiError> {
        let Some((name, _)) = self.map.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
        let shown: String = name.chars().take(64).collect();
        let hint = nearest(&shown, &self.known).map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
        let message = format!("unknown field {shown:?}{hint}");
        Err(ApiError::field(self.path(&shown), message))
    }
}

/// A list of token ids below `vocab_size`, all of them.
///
/// # Errors
/// 400 naming the field and the first id that is not one.
pub fn token_ids(path: &str, values: &[Value], vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
    values.iter().map(|value| token_id(path, value, vocab_size)).collect()
}

/// One token id below `vocab_size`.
///
/// # Errors
/// 400 naming the field and the id.
pub fn token_id(path: &str, value: &Value, vocab_size: u32) -> Result<TokenId, ApiError> {
    let Some(number) = value.as_number().filter(|number| !number.is_f64()) else {
        return Err(wrong_type(path, "a list of token ids", value));
    };
    let id = number.as_u64().and_then(|id| TokenId::try_from(id).ok()).filter(|&id| id < vocab_size);
    id.ok_or_else(|| {
        ApiError::field(path, format!("{path}: {number} is not a token id; ids are 0 to {}", vocab_size - 1))
    })
}

/// A whole number inside `range`.
///
/// # Errors
/// 400 naming the field.
pub fn whole(path: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
    let number = match value {
        Value::Number(number) if !number.is_f64() => number,
        other => return Err(wrong_type(path, "a whole number", other)),
    };
    match number.as_i64().filter(|number| range.contains(number)) {
        Some(number) => Ok(number),
        None => Err(outside(path, value, range.start(), range.end())),
    }
}

/// 400: a value of the wrong type.
pub fn wrong_type(path: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError::field(path, format!("{path} must be {wanted}, not {}", kind(found)))
}

fn outside<T: std::fmt::Display>(path: &str, value: &Value, low: T, high: T) -> ApiError {
    ApiError::field(path, format!("{path} must be between {low} and {high}, not {value}"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(number) if number.is_f64() => "a fraction",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The known name with the smallest edit distance, if it is near enough to be a misspelling.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let (distance, near) = known.iter().map(|near| (edit_distance(name, near), *near)).min()?;
    (distance <= 1 + near.len() / 4).then_some(near)
}

/// Levenshtein distance in characters.
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

/// Which fields the readers of this thread take, for tests that compare them with what is documented.
#[cfg(test)]
pub mod taken {
    use std::cell::RefCell;

    thread_local! {
        static PATHS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn note(path: String) {
        PATHS.with_borrow_mut(|paths| paths.push(path));
    }

    /// The paths taken while `read` runs.
    pub fn during(read: impl FnOnce()) -> Vec<String> {
        PATHS.take();
        read();
        PATHS.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::of(value, "").unwrap()
    }

    #[test]
    fn a_left_over_field_is_named_with_its_neighbour() {
        let mut body = fields(json!({"max_tokenz": 5, "n": null}));
        assert_eq!(body.count("max_tokens").unwrap(), None);
        assert_eq!(body.integer("n", 1..=8).unwrap(), None);
        let error = body.finish().unwrap_err();
        assert_eq!(error.param(), Some("max_tokenz"));
        assert!(error.to_string().contains("\"max_tokens\""), "{error}");
    }

    #[test]
    fn numbers_are_checked_for_type_and_range() {
        for (value, fine) in
            [(json!(1), true), (json!(0.5), true), (json!(2.1), false), (json!("1"), false), (json!(true), false)]
        {
            assert_eq!(
                fields(json!({ "temperature": value })).number("temperature", 0.0..=2.0).is_ok(),
                fine,
                "{value}"
            );
        }
        for (value, fine) in [(json!(3), true), (json!(3.0), false), (json!(-1), false), (json!(u64::MAX), false)] {
            assert_eq!(fields(json!({ "n": value })).integer("n", 1..=8).is_ok(), fine, "{value}");
        }
    }

    #[test]
    fn token_ids_stay_inside_the_vocabulary() {
        assert_eq!(token_ids("prompt", &[json!(0), json!(9)], 10).unwrap(), vec![0, 9]);
        for bad in [json!(10), json!(-1), json!(1.0), json!("1"), json!(u64::MAX)] {
            let error = token_ids("prompt", &[json!(1), bad.clone()], 10).unwrap_err();
            assert_eq!(error.param(), Some("prompt"), "{bad}");
        }
    }

    #[test]
    fn the_edit_distance_is_levenshtein() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(nearest("zzzzzz", &["model", "stop"]), None);
    }
}
