//! Typed access to a TOML table that knows where everything stands. Owner: the reader, for the length of one parse.
//! Invariant: a table is opened with all the keys it may have, so an unknown key is an error before anything is read.

use crate::error::{ConfigError, Place, Places, one_line};
use crate::nearest::hint;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(crate) type Value<'t> = Spanned<DeValue<'t>>;

/// The text being read and the places found so far.
pub(crate) struct Document<'t> {
    pub(crate) text: &'t str,
    pub(crate) places: Places,
}

impl Document<'_> {
    /// An error at a span of the text.
    pub(crate) fn error(&self, span: Range<usize>, message: impl AsRef<str>) -> ConfigError {
        ConfigError {
            path: self.places.path.clone(),
            place: Some(Place::of(self.text, span.start)),
            message: one_line(message.as_ref()),
        }
    }

    pub(crate) fn mark(&mut self, key: String, span: &Range<usize>) {
        let place = Place::of(self.text, span.start);
        self.places.by_key.insert(key, place);
    }
}

/// One table with the keys it may have.
pub(crate) struct Fields<'a, 't> {
    /// As a person would name it: `[server]`.
    pub(crate) title: &'a str,
    /// Dotted path of the table.
    pub(crate) path: String,
    span: Range<usize>,
    table: &'a DeTable<'t>,
    keys: Vec<&'a str>,
}

impl<'a, 't> Fields<'a, 't> {
    /// Opens a table: records the places of its values and refuses unknown keys.
    pub(crate) fn open(
        doc: &mut Document<'_>,
        (title, path): (&'a str, &str),
        value: &'a Value<'t>,
        keys: Vec<&'a str>,
    ) -> Result<Self, ConfigError> {
        let DeValue::Table(table) = value.get_ref() else {
            return Err(doc.error(value.span(), wrong_type(path, "a table", value.get_ref())));
        };
        doc.mark(path.to_owned(), &value.span());
        let mut unknown: Option<&Spanned<_>> = None;
        for (key, value) in table {
            doc.mark(join(path, key.get_ref()), &value.span());
            let earlier = unknown.is_none_or(|seen| key.span().start < seen.span().start);
            if earlier && !keys.contains(&key.get_ref().as_ref()) {
                unknown = Some(key);
            }
        }
        if let Some(key) = unknown {
            let name = key.get_ref();
            return Err(doc.error(key.span(), format!("unknown key `{name}` in {title}; {}", hint(name, &keys))));
        }
        Ok(Fields { title, path: path.to_owned(), span: value.span(), table, keys })
    }

    /// The raw value of a key.
    pub(crate) fn raw(&self, key: &str) -> Option<&'a Value<'t>> {
        debug_assert!(self.keys.contains(&key), "{key} is not declared for {}", self.title);
        self.table.iter().find(|(name, _)| name.get_ref() == key).map(|(_, value)| value)
    }

    /// A value of type `T`, or nothing when the key is absent.
    pub(crate) fn optional<T: FromToml>(&self, doc: &Document<'_>, key: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.raw(key) else { return Ok(None) };
        T::from_toml(value.get_ref())
            .map(Some)
            .map_err(|problem| doc.error(value.span(), problem.message(&join(&self.path, key), value.get_ref())))
    }

    /// A value of type `T`, or `default` when the key is absent.
    pub(crate) fn or<T: FromToml>(&self, doc: &Document<'_>, key: &str, default: T) -> Result<T, ConfigError> {
        Ok(self.optional(doc, key)?.unwrap_or(default))
    }

    /// A value of type `T` that must be there; `example` shows how it is written.
    pub(crate) fn required<T: FromToml>(&self, doc: &Document<'_>, key: &str, example: &str) -> Result<T, ConfigError> {
        self.optional(doc, key)?.ok_or_else(|| {
            doc.error(self.span.clone(), format!("{} has no `{key}`; add {key} = {example}", self.title))
        })
    }

    /// One of a few words, each standing for a value.
    pub(crate) fn choice<T: Copy>(
        &self,
        doc: &Document<'_>,
        key: &str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, ConfigError> {
        let Some(word) = self.optional::<String>(doc, key)? else { return Ok(None) };
        match words.iter().find(|(name, _)| *name == word) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
                let path = join(&self.path, key);
                Err(doc.places.error(&path, format!("{path} = \"{word}\" is unknown; {}", hint(&word, &names))))
            }
        }
    }
}

/// `table.key`, or just `key` at the top.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Why a value is not what its key wants.
pub(crate) enum Problem {
    /// Another type; what was wanted.
    Type(&'static str),
    /// The right type but not a possible value; what is wrong.
    Value(String),
}

impl Problem {
    fn message(&self, path: &str, value: &DeValue<'_>) -> String {
        match self {
            Problem::Type(wanted) => wrong_type(path, wanted, value),
            Problem::Value(what) => format!("{path} {what}"),
        }
    }
}

fn wrong_type(path: &str, wanted: &str, value: &DeValue<'_>) -> String {
    let found = match value.type_str() {
        kind @ ("integer" | "array") => format!("an {kind}"),
        kind => format!("a {kind}"),
    };
    let path = if path.is_empty() { "the file" } else { path };
    format!("{path} must be {wanted}, not {found}")
}

/// A type a key can have.
pub(crate) trait FromToml: Sized {
    fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem>;
}

impl FromToml for bool {
    fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem> {
        match value {
            DeValue::Boolean(yes) => Ok(*yes),
            _ => Err(Problem::Type("true or false")),
        }
    }
}

impl FromToml for String {
    fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem> {
        value.as_str().map(str::to_owned).ok_or(Problem::Type("a string in quotes"))
    }
}

/// Whole numbers of every width; out of range says what the range is.
macro_rules! whole_numbers {
    ($($kind:ty),*) => {$(
        impl FromToml for $kind {
            fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem> {
                let number = value.as_integer().ok_or(Problem::Type("a whole number"))?;
                <$kind>::from_str_radix(number.as_str(), number.radix())
                    .map_err(|_| Problem::Value(format!("= {number} is out of range; give 0 to {}", <$kind>::MAX)))
            }
        }
    )*};
}
whole_numbers!(u16, u32, u64);

impl<T: FromToml> FromToml for Vec<T> {
    fn from_toml(value: &DeValue<'_>) -> Result<Self, Problem> {
        let items = value.as_array().ok_or(Problem::Type("an array"))?;
        items.iter().map(|item| T::from_toml(item.get_ref())).collect::<Result<_, _>>().map_err(|problem| match problem
        {
            Problem::Type(wanted) => Problem::Value(format!("holds an entry of another type; each must be {wanted}")),
            value => value,
        })
    }
}
