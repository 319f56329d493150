//! The command line as a user types it: what parses, what is refused, with which code.

use super::*;
use clap::CommandFactory;

fn parse(line: &str) -> Result<Cli, String> {
    Cli::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())
}

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn good_lines_parse() {
    for line in [
        "tokenrouter serve",
        "tokenrouter serve --config f.toml --port 0 --host localhost --log-format json",
        "tokenrouter --config f.toml serve -p 9000 --params threshold=0.1",
        "tokenrouter generate hello --json -n 20 --temperature 0.7 --seed 3 --model small",
        "tokenrouter generate - --raw --color always --stop a --stop b",
        "tokenrouter chat --system brief",
        "tokenrouter check --config f.toml",
        "tokenrouter eval problems.jsonl --model small --concurrency 4 --json --check last-number",
        "tokenrouter eval --params threshold=0.1 --params threshold=0.2",
        "tokenrouter sweep",
        "tokenrouter sweep problems.jsonl --config f.toml --algorithm r_stitch --param threshold --values -0.5,0.1 --out d",
        "tokenrouter sweep --algorithm a --param x --values 0.001:0.3:12:log --algorithm b:c=d --param y --values 1 --json",
    ] {
        parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

#[test]
fn wrong_lines_are_refused_by_name() {
    for (line, part) in [
        ("tokenrouter srve", "serve"),
        ("tokenrouter serve --prot 1", "--port"),
        ("tokenrouter serve --port 99999", "--port"),
        ("tokenrouter generate", "<PROMPT>"),
        ("tokenrouter generate x --temperature 3", "between 0 and 2"),
        ("tokenrouter generate x --max-tokens 0", "--max-tokens"),
        ("tokenrouter generate x --raw --system y", "--system"),
        ("tokenrouter eval --concurrency 0", "--concurrency"),
        ("tokenrouter sweep --values 0.1:0.2", "LOW:HIGH:COUNT"),
    ] {
        let error = parse(line).err().unwrap_or_else(|| panic!("{line} parses"));
        assert!(error.contains(part), "{line}: {error}");
    }
}

/// Whoever prints results can print them for programs.
#[test]
fn every_command_with_results_prints_json() {
    fn leaves(command: &clap::Command, path: &str, found: &mut Vec<(String, bool)>) {
        for sub in command.get_subcommands() {
            let path = format!("{path} {}", sub.get_name());
            if sub.has_subcommands() {
                leaves(sub, &path, found);
            } else {
                found.push((path, sub.get_arguments().any(|argument| argument.get_id() == "json")));
            }
        }
    }
    let (command, mut found) = (Cli::command(), Vec::new());
    leaves(&command, "", &mut found);
    let without: Vec<&str> = found.iter().filter(|(_, json)| !json).map(|(path, _)| path.as_str()).collect();
    assert_eq!(without, [" serve", " chat", " completions"], "a server, a conversation, a script for a shell");
    assert!(found.len() >= 17, "{found:?}");
}

#[test]
fn params_are_json_where_they_can_be() {
    let read = options::params("threshold=0.02,mode=fast,p=[[0,1],[1,0]],on=true").expect("good");
    let read: Vec<String> = read.iter().map(|(name, value)| format!("{name}:{value}")).collect();
    assert_eq!(read, ["threshold:0.02", "mode:\"fast\"", "p:[[0,1],[1,0]]", "on:true"]);
    for bad in ["threshold", "=1", ""] {
        assert!(options::params(bad).expect_err(bad).to_string().contains("NAME=VALUE"));
    }
}

#[test]
fn exit_codes_tell_settings_from_failures() {
    let code = |line: &str| format!("{:?}", run(line.split_whitespace().map(OsString::from)));
    let expected = |code: u8| format!("{:?}", ExitCode::from(code));
    assert_eq!(code("tokenrouter --version"), expected(0));
    assert_eq!(code("tokenrouter serve --prot 1"), expected(2));
    assert_eq!(code("tokenrouter check --config no/such/file.toml"), expected(2));
    assert_eq!(code("tokenrouter check --params threshold"), expected(2));
}
