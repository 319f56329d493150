//! The documentation: its pages build, its links lead somewhere, its commands run, and what it says of the program is what
//! the program says. Owner: docs/, README.md. `UPDATE_DOCS=1` (`just docs`) writes the pages that are made.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use tokenrouter_config::{LaunchFile, schema};
use tokenrouter_tests::clients::{Venv, folder, run, scratch};
use tokenrouter_tests::docs::pages::{Block, Mark, all};
use tokenrouter_tests::docs::shell::{SUBSTITUTIONS, Workshop};
use tokenrouter_tests::docs::{api, links, reference, root};
use tokenrouter_tests::http_server::Server;

fn none(what: &str, faults: &[String]) {
    assert!(faults.is_empty(), "{what}:\n  {}", faults.join("\n  "));
}

fn openapi() -> Value {
    let server = Server::launch(folder().join("openapi_launch.toml"));
    let mut socket = TcpStream::connect(server.address).expect("the server listens");
    socket.write_all(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("it is sent");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("an answer");
    server.stop();
    serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
}

#[test]
fn pages_made_from_the_program_are_current() {
    let made = [
        ("cli.md", reference::cli()),
        ("config.md", reference::config()),
        ("routers.md", reference::routers()),
        ("api.md", api::page(&openapi())),
        ("launch.schema.json", format!("{:#}\n", schema::json())),
    ];
    let mut stale = Vec::new();
    for (name, text) in made {
        let file = root().join("docs/reference").join(name);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(&file, &text).expect("the page is written");
        }
        let found = fs::read_to_string(&file).unwrap_or_default();
        if found != text {
            let pairs = found.lines().zip(text.lines()).enumerate();
            let line = pairs.clone().find(|(_, (old, new))| old != new).map_or(0, |(at, _)| at + 1);
            stale.push(format!("docs/reference/{name}:{line}: not what the program says; run `just docs`"));
        }
    }
    none("pages that are not current", &stale);
}

#[test]
fn links_and_named_files_exist() {
    let pages = all();
    assert!(pages.len() > 25, "only {} pages", pages.len());
    let mut faults: Vec<String> = pages.iter().flat_map(|page| links::faults(page, &pages)).collect();
    faults.extend(pages.iter().filter(|page| page.name != "ARCHITECTURE.md").flat_map(links::missing_files));
    none("links and files that lead nowhere", &faults);
}

/// Words in backticks that begin with `vllm:` or `tokenrouter:`.
fn metrics(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split('`').skip(1).step_by(2);
    let word = |word: &'static str| move |text: &&str| text.starts_with(word);
    let (vllm, own) = (word("vllm:"), word("tokenrouter:"));
    words.filter(move |text| vllm(text) || own(text)).filter(|text| !text.ends_with('…'))
}

/// Variables of the environment that the program asks for are those that docs/reference/environment.md lists.
#[test]
fn the_environment_is_described() {
    let page = fs::read_to_string(root().join("docs/reference/environment.md")).expect("the page is there");
    let upper = |word: &&str| word.len() > 3 && word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    let described: BTreeSet<&str> = page.split('`').skip(1).step_by(2).filter(upper).collect();
    let read = |name: &str| {
        let source = fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        source.split("#[cfg(test)]").next().unwrap_or_default().to_owned()
    };
    let sources = ["api/src/launch/environment.rs", "api/src/telemetry/settings.rs"].map(read).concat();
    let asked: BTreeSet<&str> =
        sources.split("variable(\"").skip(1).filter_map(|rest| rest.split('"').next()).filter(upper).collect();
    assert!(asked.len() > 10, "{asked:?}");
    assert_eq!(described, asked);
}

/// docs/metrics.md is held to a live server; the other pages are held to it.
#[test]
fn metrics_that_pages_name_exist() {
    let pages = all();
    let reference = pages.iter().find(|page| page.name == "docs/metrics.md").expect("docs/metrics.md is there");
    let known: Vec<&str> = metrics(&reference.text).collect();
    assert!(known.len() > 40, "{known:?}");
    let mut unknown = Vec::new();
    for page in pages.iter().filter(|page| page.name != reference.name && page.name != "CHANGELOG.md") {
        let names = metrics(&page.text).map(|name| name.split('{').next().unwrap_or(name));
        let wrong = names.filter(|name| !known.contains(name)).map(|name| format!("{}: {name}", page.name));
        unknown.extend(wrong);
    }
    none("metrics that docs/metrics.md does not have", &unknown);
}

/// Every file below a folder with this ending.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.extension().is_some_and(|end| end == ending) {
            found.push(path);
        }
    }
    found
}

#[test]
fn the_book_builds_with_every_page() {
    let contents = fs::read_to_string(root().join("docs/SUMMARY.md")).expect("docs/SUMMARY.md is there");
    let missing: Vec<String> = all()
        .iter()
        .filter_map(|page| page.name.strip_prefix("docs/").map(str::to_owned))
        .filter(|name| name != "SUMMARY.md" && !contents.contains(&format!("({name})")))
        .collect();
    none("pages that docs/SUMMARY.md does not list", &missing);
    let book = scratch("book");
    let mut mdbook = Venv::of("requirements-book.txt").program("mdbook");
    let output = run(mdbook.arg("build").arg(root().join("docs")).arg("--dest-dir").arg(&book), "see what is wrong");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
    // What mdBook made of the links: every page and picture that a page of the book refers to is in the book.
    let mut dangling = Vec::new();
    let pages = files(&book, "html");
    for page in &pages {
        let html = fs::read_to_string(page).expect("a page is text");
        let body = html.split_once("<main>").map_or("", |(_, rest)| rest.split("</main>").next().unwrap_or(""));
        for attribute in ["href=\"", "src=\""] {
            for target in body.split(attribute).skip(1).filter_map(|rest| rest.split('"').next()) {
                let path = target.split('#').next().unwrap_or_default();
                let outside = target.contains("://") || target.starts_with("mailto:") || path.is_empty();
                if !outside && !page.parent().expect("a folder").join(path).exists() {
                    dangling.push(format!("{}: {target}", page.display()));
                }
            }
        }
    }
    assert!(pages.len() > 25, "only {} pages were built", pages.len());
    none("links of the book that lead nowhere", &dangling);
}

/// Whether the command line of a block, its continuation lines joined, is one that the program takes.
fn refused(line: &str) -> Option<String> {
    let line = line.strip_prefix("$ ").unwrap_or(line).trim();
    let rest = line.strip_prefix("cargo run --release --").or_else(|| line.strip_prefix("tokenrouter "))?;
    let command = rest.split(" > ").next().unwrap_or(rest);
    let words = words(command)?;
    // What a page leaves out or lets the reader fill in.
    if words.is_empty() || words.iter().any(|word| word.contains('…') || word.contains("...") || *word == "COMMAND") {
        return None;
    }
    let words = std::iter::once("tokenrouter".to_owned()).chain(words);
    let error = tokenrouter::cli::command().try_get_matches_from(words).err()?;
    let harmless = !error.use_stderr();
    (!harmless).then(|| format!("{line}: {}", error.to_string().lines().next().unwrap_or_default()))
}

/// The words of a command as a shell takes them, without what follows `#`, `|`, `;` or `&`; none if a quote is left open.
fn words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quote, mut begun) = (Vec::new(), String::new(), None, false);
    for letter in command.chars() {
        match (quote, letter) {
            (Some(open), letter) if letter == open => quote = None,
            (None, '"' | '\'') => (quote, begun) = (Some(letter), true),
            (None, '#') if !begun => break,
            (None, '|' | ';' | '&') => break,
            (None, letter) if letter.is_whitespace() => {
                if begun {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            (_, letter) => {
                word.push(letter);
                begun = true;
            }
        }
    }
    if begun {
        words.push(word);
    }
    quote.is_none().then_some(words)
}

#[test]
fn every_command_line_is_one_that_the_program_takes() {
    assert_eq!(words("a 'b c' \"d\"e # f").as_deref(), Some(&["a", "b c", "de"].map(str::to_owned)[..]));
    assert!(refused("tokenrouter serve --prot 1").is_some() && refused("tokenrouter serve --port 1  # x").is_none());
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in all() {
        for block in page.blocks().iter().filter(|block| !["text", "toml"].contains(&block.language.as_str())) {
            let joined = block.text.replace("\\\n", " ");
            let lines = joined.lines().filter(|line| line.contains("tokenrouter") || line.contains("cargo run"));
            for line in lines {
                seen += 1;
                wrong.extend(refused(line).map(|fault| format!("{}:{}: {fault}", page.name, block.line)));
            }
        }
    }
    assert!(seen > 40, "only {seen} commands");
    none("commands that the program refuses", &wrong);
}

/// A piece of a launch file, with models and a router where it has none.
fn whole(piece: &str) -> Result<String, String> {
    let mut file: toml::Table = piece.parse().map_err(|error: toml::de::Error| error.to_string())?;
    if !file.contains_key("models") {
        let models = "[[models]]\nname = \"small\"\npath = \"s\"\n[[models]]\nname = \"large\"\npath = \"l\"\n";
        file.extend(models.parse::<toml::Table>().expect("TOML"));
    }
    let several = file["models"].as_array().is_some_and(|models| models.len() > 1);
    let router = file.entry("router").or_insert_with(|| toml::Table::new().into());
    if let (true, Some(router)) = (several, router.as_table_mut()) {
        router.entry("algorithm").or_insert_with(|| "r_stitch".into());
    }
    Ok(file.to_string())
}

/// Launch files and pieces of them, pieces of sources, and marks that say why something is not run.
fn read_only(block: &Block) -> Result<(), String> {
    match (&block.mark, block.language.as_str()) {
        (Mark::NotRun(reason), _) if reason.len() < 10 => Err("no reason".to_owned()),
        (Mark::From(path), _) => {
            let source = fs::read_to_string(root().join(path)).map_err(|error| format!("{path}: {error}"))?;
            let mut rest = source.as_str();
            for line in block.text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "// ...") {
                rest = rest.split_once(line).ok_or_else(|| format!("{path} has no line `{line}` here"))?.1;
            }
            Ok(())
        }
        (Mark::None | Mark::File(_), "toml") => {
            let text = whole(&block.text)?;
            LaunchFile::parse(&text, Path::new("launch.toml")).map(drop).map_err(|error| error.to_string())
        }
        _ => Ok(()),
    }
}

#[test]
fn pieces_of_files_are_what_they_seem() {
    let mut faults = Vec::new();
    for page in all() {
        for block in page.blocks() {
            let fault = read_only(&block).err().map(|fault| format!("{}:{}: {fault}", page.name, block.line));
            faults.extend(fault);
        }
    }
    none("pieces of files that are wrong", &faults);
}

#[test]
fn every_command_runs() {
    let program = scratch("docs").join("tokenrouter");
    let _ = fs::remove_file(&program);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_soak"), &program).expect("a link to the program");
    let python = Venv::of("requirements.txt").program("python");
    let tools = Path::new(python.get_program()).parent().expect("a folder").to_owned();
    let (mut faults, mut ran, mut used) = (Vec::new(), 0, vec![false; SUBSTITUTIONS.len()]);
    for page in all() {
        let blocks = page.blocks();
        let runs = |block: &&Block| !matches!(block.mark, Mark::NotRun(_) | Mark::From(_));
        if !blocks.iter().filter(runs).any(|block| ["sh", "console", "python"].contains(&block.language.as_str())) {
            continue;
        }
        let name = page.name.replace('/', "-");
        let workshop = Workshop::new(scratch("docs").join(name), &program, &tools);
        for block in blocks.iter().filter(runs) {
            let started = Instant::now();
            for (used, (from, _, _)) in used.iter_mut().zip(SUBSTITUTIONS) {
                *used |= block.text.contains(from);
            }
            match workshop.run(block) {
                Ok(()) => ran += 1,
                Err(fault) => faults.push(format!("{}:{}: {}\n{fault}", page.name, block.line, block.text)),
            }
            println!("{}:{}: {:.1} s", page.name, block.line, started.elapsed().as_secs_f64());
        }
    }
    none("blocks that do not run", &faults);
    assert!(ran > 20, "only {ran} blocks ran");
    let idle = used.iter().zip(SUBSTITUTIONS).filter(|(used, _)| !**used).map(|(_, (from, _, _))| (*from).to_owned());
    none("substitutions that nothing needs", &idle.collect::<Vec<_>>());
}

#[test]
fn a_service_file_and_a_container_file_are_sound() {
    let folder = root().join("config/deploy");
    let unit = fs::read_to_string(folder.join("tokenrouter.service")).expect("a unit");
    for key in ["ExecStart=", "ExecReload=", "TimeoutStopSec=", "DynamicUser=yes", "ProtectSystem=strict"] {
        assert!(unit.contains(key), "tokenrouter.service has no {key}");
    }
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("it starts something");
    let arguments = start.split_whitespace().skip(1).map(str::to_owned);
    let words = std::iter::once("tokenrouter".to_owned()).chain(arguments);
    tokenrouter::cli::command().try_get_matches_from(words).unwrap_or_else(|error| panic!("{start}: {error}"));
    let drain =
        LaunchFile::parse("[[models]]\nname = \"m\"\npath = \"m\"", Path::new("x")).expect("a file").server.drain_ms;
    let patience = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).expect("a time");
    assert!(patience.parse::<u64>().expect("seconds") * 1000 > drain + 1000, "{patience} s is no time to drain");
    let containerfile = fs::read_to_string(folder.join("Containerfile")).expect("a file");
    let instructions: Vec<&str> = containerfile
        .lines()
        .filter(|line| !line.starts_with([' ', '#']) && !line.is_empty())
        .map(|line| line.split_whitespace().next().unwrap_or_default())
        .collect();
    let known = [
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "ENV",
        "EXPOSE",
        "ENTRYPOINT",
        "CMD",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "VOLUME",
        "ARG",
    ];
    assert!(instructions.iter().all(|word| known.contains(word)), "{instructions:?}");
    assert!(instructions.iter().filter(|word| **word == "FROM").count() == 2, "two stages: {instructions:?}");
    assert!(instructions.contains(&"USER") && !containerfile.contains("USER root"), "it runs as root");
    builds_from_what_it_copies(&containerfile);
    let command = containerfile.lines().find_map(|line| line.strip_prefix("CMD ")).expect("it runs something");
    let words: Vec<String> = serde_json::from_str(command).expect("a list of words");
    let words = std::iter::once("tokenrouter".to_owned()).chain(words);
    tokenrouter::cli::command().try_get_matches_from(words).unwrap_or_else(|error| panic!("{command}: {error}"));
    if Command::new("systemd-analyze").arg("--version").output().is_ok_and(|output| output.status.success()) {
        verify(&unit);
    }
}

/// What the first stage copies is a whole workspace, with every file that the sources include.
fn builds_from_what_it_copies(containerfile: &str) {
    let stage = scratch("docs-container").join("src");
    let _ = fs::remove_dir_all(&stage);
    fs::create_dir_all(&stage).expect("a folder");
    let mut copied = Vec::new();
    for line in containerfile.lines().filter(|line| line.starts_with("COPY") && !line.contains("--from")) {
        let mut words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let to = words.pop().expect("a target");
        for from in words {
            let to = if to == "./" { stage.join(from) } else { stage.join(to) };
            std::os::unix::fs::symlink(root().join(from), to).expect("a link");
            copied.push(from.to_owned());
        }
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked", "--offline"]).current_dir(&stage);
    let output = run(&mut cargo, "the folders that the Containerfile copies are no workspace");
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"name\":\"tokenrouter\""));
    for folder in ["actors", "api", "config", "gpu", "kernels"] {
        for source in files(&root().join(folder), "rs") {
            let text = fs::read_to_string(&source).expect("a source is text");
            let includes = ["include_bytes!(\"", "include_str!(\""];
            for name in includes.iter().flat_map(|include| text.split(include).skip(1)) {
                let Some(name) = name.split('"').next().filter(|name| name.contains("../")) else { continue };
                let file = source.parent().expect("a folder").join(name).canonicalize();
                let file = file.unwrap_or_else(|error| panic!("{}: {name}: {error}", source.display()));
                let inside = copied.iter().any(|from| file.starts_with(root().join(from)));
                assert!(
                    inside,
                    "{} includes {}, which the Containerfile does not copy",
                    source.display(),
                    file.display()
                );
            }
        }
    }
}

/// systemd's own opinion, with a program that exists in the place of the one that is installed later.
fn verify(unit: &str) {
    let file = scratch("docs-unit").join("tokenrouter.service");
    let start = unit.lines().find(|line| line.starts_with("ExecStart=")).expect("it starts something");
    fs::write(&file, unit.replace(start, "ExecStart=/bin/true")).expect("written");
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let about: Vec<&str> = said.lines().filter(|line| line.contains("tokenrouter.service")).collect();
    assert!(about.is_empty(), "{}", about.join("\n"));
}
