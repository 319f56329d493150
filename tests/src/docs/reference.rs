//! Pages made from the program: the command line, the keys of launch files, the routing algorithms. Pure. Invariant: what
//! they say is what the program itself goes by.

use clap::{Arg, ArgAction, Command};
use std::fmt::Write as _;
use tokenrouter_config::schema::{Default, Key, Kind, TOP, Table};
use tokenrouter_core::routing;

/// How a page that is made says so.
const HEAD: &str = "<!-- Made by `just docs` from the program; a test holds it to it. -->\n\n";

/// Appends a line.
macro_rules! line {
    ($page:expr) => { $page.push('\n') };
    ($page:expr, $($part:tt)*) => {{
        // Writing to a text does not fail.
        let _ = writeln!($page, $($part)*);
    }};
}

/// A cell of a table.
pub(super) fn cell(text: &str) -> String {
    text.trim().replace('|', "\\|").replace('\n', " ")
}

/// docs/reference/cli.md
pub fn cli() -> String {
    let mut command = tokenrouter::cli::command();
    command.build();
    let mut page = format!("{HEAD}# Command line\n\n");
    line!(
        page,
        "`tokenrouter COMMAND --help` says the same. Exit code 0: done; 2: settings that are wrong, told in one line;"
    );
    line!(page, "1: anything else.");
    line!(page, "\n## Every command\n");
    options(&mut page, command.get_arguments().filter(|arg| arg.is_global_set()));
    for inner in command.get_subcommands() {
        describe(&mut page, inner, "tokenrouter");
    }
    page
}

fn describe(page: &mut String, command: &Command, before: &str) {
    if command.get_name() == "help" || command.is_hide_set() {
        return;
    }
    let name = format!("{before} {}", command.get_name());
    line!(page, "\n## {name}\n");
    let about = command.get_long_about().or_else(|| command.get_about());
    line!(page, "{}.", about.map(ToString::to_string).unwrap_or_default().trim_end_matches('.'));
    let own = || command.get_arguments().filter(|arg| !arg.is_global_set() && !arg.is_hide_set());
    let own = || own().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str()));
    if own().count() > 0 {
        line!(page);
        options(page, own());
    }
    for inner in command.get_subcommands() {
        describe(page, inner, &name);
    }
}

fn options<'a>(page: &mut String, arguments: impl Iterator<Item = &'a Arg>) {
    line!(page, "| option | meaning |");
    line!(page, "|---|---|");
    for arg in arguments {
        line!(page, "| {} | {} |", spelt(arg), cell(&meaning(arg)));
    }
}

/// `` `-c`, `--config FILE` ``
fn spelt(arg: &Arg) -> String {
    let values = match arg.get_action() {
        ArgAction::Set | ArgAction::Append => {
            arg.get_value_names().unwrap_or_default().iter().map(|name| format!(" {name}")).collect::<String>()
        }
        _ => String::new(),
    };
    match (arg.get_short(), arg.get_long()) {
        (Some(short), Some(long)) => cell(&format!("`-{short}`, `--{long}{values}`")),
        (Some(short), None) => cell(&format!("`-{short}{values}`")),
        (None, Some(long)) => cell(&format!("`--{long}{values}`")),
        (None, None) => cell(&format!("`{}`", values.trim())),
    }
}

fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut text = help.trim().to_owned();
    let flag = matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::Help | ArgAction::Version);
    let values: Vec<String> = if flag { Vec::new() } else { arg.get_possible_values().iter().map(value).collect() };
    if !values.is_empty() && !arg.is_hide_possible_values_set() {
        text = format!("{text}: {}", values.join(", "));
    }
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    if !defaults.is_empty() && !flag && defaults != ["``"] {
        text = format!("{text}. Default: {}", defaults.join(", "));
    }
    if arg.is_required_set() {
        text = format!("{text}. Required");
    }
    text
}

fn value(value: &clap::builder::PossibleValue) -> String {
    match value.get_help() {
        Some(help) => format!("`{}` ({})", value.get_name(), help.to_string().trim_end_matches('.')),
        None => format!("`{}`", value.get_name()),
    }
}

/// docs/reference/config.md
pub fn config() -> String {
    let mut page = format!("{HEAD}# Launch files\n\n{}\n\n", TOP.about);
    line!(
        page,
        "For completion and checks while you type there is a JSON Schema, [launch.schema.json](launch.schema.json);"
    );
    line!(
        page,
        "`tokenrouter check --schema` prints it too. Editors with Even Better TOML or Taplo take it from the first line of"
    );
    line!(page, "a file: `#:schema ./launch.schema.json`. Launch files to copy are in `config/presets`.");
    tables(&mut page, &TOP);
    page
}

fn tables(page: &mut String, table: &'static Table) {
    for key in table.keys {
        if let Kind::Table(inner) | Kind::Tables(inner) = key.kind {
            line!(page, "\n## `{}`\n\n{}\n", inner.title, inner.about);
            line!(page, "| key | type | default | meaning |");
            line!(page, "|---|---|---|---|");
            for key in inner.keys {
                line!(
                    page,
                    "| `{}` | {} | {} | {} |",
                    key.name,
                    cell(&kind(key)),
                    cell(&default(key)),
                    cell(&about(key))
                );
            }
            tables(page, inner);
        }
    }
}

fn kind(key: &Key) -> String {
    let range = |least: u64, most: u64| match most {
        u64::MAX if least == 0 => "whole number".to_owned(),
        u64::MAX => format!("whole number from {least}"),
        most => format!("{least} to {most}"),
    };
    match &key.kind {
        Kind::Text => "text".to_owned(),
        Kind::Name => "name".to_owned(),
        Kind::File => "file".to_owned(),
        Kind::Source => "folder, file or `hf:…`".to_owned(),
        Kind::Device => "`\"cpu\"`, `\"cuda:0\"` to `\"cuda:63\"`".to_owned(),
        Kind::Flag => "`true` or `false`".to_owned(),
        Kind::Whole { least, most } => range(*least, *most),
        Kind::ZeroOr { least, most } => format!("0, or {}", range(*least, *most)),
        Kind::Amount { least, most } => match *most {
            u64::MAX => "amount such as `\"512 MiB\"`".to_owned(),
            most => {
                let bound = |bytes: u64| tokenrouter_config::Bytes(bytes).to_string();
                format!("amount, `\"{}\"` to `\"{}\"`", bound(*least), bound(most))
            }
        },
        Kind::Word(words) => words.iter().map(|(word, _)| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", "),
        Kind::Wholes => "list of whole numbers".to_owned(),
        Kind::Texts => "list of texts".to_owned(),
        Kind::PerModel { most } => format!("table: model to 1 to {most}"),
        Kind::Open => "table".to_owned(),
        Kind::Table(inner) => format!("table `{}`", inner.title),
        Kind::Tables(inner) => format!("tables `{}`", inner.title),
    }
}

fn default(key: &Key) -> String {
    match key.default {
        Default::Required => "**required**".to_owned(),
        Default::Words(words) => words.to_owned(),
        Default::Text(text) | Default::Amount(text) => format!("`\"{text}\"`"),
        Default::Whole(number) => format!("`{number}`"),
        Default::Flag(flag) => format!("`{flag}`"),
    }
}

fn about(key: &Key) -> String {
    let Kind::Word(words) = key.kind else { return key.about.to_owned() };
    let words: Vec<String> = words.iter().map(|(word, meaning)| format!("`{word}`: {meaning}")).collect();
    format!("{} {}.", key.about, words.join("; "))
}

/// docs/reference/routers.md
pub fn routers() -> String {
    let mut page = format!("{HEAD}# Routing algorithms\n\n");
    line!(
        page,
        "What `algorithm` in `[router]` can be, and the keys of `[router.params]`; a key that is not listed is refused."
    );
    line!(
        page,
        "`--params NAME=VALUE` comes before the launch file. Parameters marked \"request\" can also be set by one request:"
    );
    line!(
        page,
        "`\"routing\": {{\"threshold\": 0.1}}`. `GET /v1/routers` lists the same of a running server, with the algorithms that a"
    );
    line!(page, "program adds. Which one to take: [choosing a router](../choose-router.md).");
    for entry in routing::list() {
        line!(page, "\n## `{}`\n", entry.name);
        let (least, most) = entry.models;
        let models = if least == most { format!("{least}") } else { format!("{least} to {most}") };
        line!(page, "{}.\n", sentence(entry.summary));
        line!(page, "Source: {}. Models: {models}.", entry.source);
        if entry.params.is_empty() {
            continue;
        }
        line!(page, "\n| parameter | type | default | request | meaning |");
        line!(page, "|---|---|---|---|---|");
        for param in entry.params {
            let request = if param.per_request { "yes" } else { "" };
            let (kind, doc) = (values(param.kind), cell(param.doc));
            line!(page, "| `{}` | {kind} | {} | {request} | {doc} |", param.name, cell(param.default));
        }
    }
    page
}

fn values(kind: routing::Kind) -> String {
    match kind {
        routing::Kind::Number { minimum, maximum } => format!("{minimum} to {maximum}"),
        routing::Kind::Integer { minimum } => format!("whole number from {minimum}"),
        routing::Kind::String => "text".to_owned(),
        routing::Kind::Array { items } => format!("list ({items})"),
        routing::Kind::Any => "see meaning".to_owned(),
    }
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
