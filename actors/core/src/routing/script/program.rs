//! A compiled script and the engine that runs it, with its bounds. Owner: the algorithm. Invariant: the engine can reach
//! no file, clock or module, and every call ends: operations, depth, strings, arrays and maps are limited.

use super::view;
use rhai::packages::{Package, StandardPackage};
use rhai::{AST, CallFnOptions, Dynamic, Engine, EvalAltResult, FuncArgs, Map, NativeCallContext, Position, Scope};
use std::fmt;

/// Operations of one call of a function.
const OPERATIONS_MAX: u64 = 100_000;
/// Functions calling functions.
const CALL_DEPTH_MAX: usize = 24;
/// Nesting of expressions.
const EXPRESSION_DEPTH_MAX: usize = 48;
/// Bytes of a string.
const STRING_BYTES_MAX: usize = 16 << 10;
/// Items of an array and entries of a map, those of values within it included. It also bounds how deep values lie within
/// values, and with that the stack it takes to walk through them.
pub(super) const ITEMS_MAX: usize = 1024;
/// Variables visible at once.
const VARIABLES_MAX: usize = 256;

/// The functions a script may define for the server, with how many parameters each has.
const FUNCTIONS: [(&str, usize); 6] =
    [("route", 1), ("needs", 0), ("entry", 1), ("prior", 0), ("send", 1), ("receive", 1)];

/// A compiled script.
pub(super) struct Program {
    /// As it was named; for errors.
    pub(super) file: String,
    /// Of the text.
    pub(super) fingerprint: u64,
    engine: Engine,
    ast: AST,
    /// The functions it defines, each with the place where it begins.
    defined: Vec<(String, Position)>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:016x})", self.file, self.fingerprint)
    }
}

/// What a call sees besides its arguments.
pub(super) struct Call<'a> {
    /// `this`.
    pub(super) state: &'a mut Dynamic,
    /// `params()`.
    pub(super) params: &'a Dynamic,
}

impl Program {
    /// Compiles a script, `file` being its name in errors.
    ///
    /// # Errors
    /// `file:line:column: what is wrong`.
    pub(super) fn compile(file: &str, source: &str) -> Result<Program, String> {
        let engine = engine();
        let ast = engine.compile(source).map_err(|error| placed(file, *error.0, error.1))?;
        for function in ast.iter_functions() {
            let known = FUNCTIONS.iter().find(|(name, _)| *name == function.name);
            if let Some((name, count)) = known.filter(|(_, count)| *count != function.params.len()) {
                let given = function.params.len();
                return Err(format!("{file}: function {name} takes {count} parameters, not {given}"));
            }
        }
        let place = |name: &str| (name.to_owned(), place_of(source, name));
        let defined: Vec<(String, Position)> = ast.iter_functions().map(|function| place(function.name)).collect();
        if !defined.iter().any(|(name, _)| name == "route") {
            return Err(format!("{file}: there is no function route(step); it decides which model goes on"));
        }
        let fingerprint = source.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3) // FNV-1a
        });
        Ok(Program { file: file.to_owned(), fingerprint, engine, ast, defined })
    }

    /// Whether the script defines a function.
    pub(super) fn has(&self, function: &str) -> bool {
        self.defined.iter().any(|(name, _)| name == function)
    }

    /// Calls a function.
    ///
    /// # Errors
    /// `file:line:column: what is wrong`.
    pub(super) fn call(&self, function: &str, arguments: impl FuncArgs, call: Call<'_>) -> Result<Dynamic, String> {
        let options = CallFnOptions::new().eval_ast(false).bind_this_ptr(call.state).with_tag(call.params.clone());
        let answer = self.engine.call_fn_with_options(options, &mut Scope::new(), &self.ast, function, arguments);
        answer.map_err(|error| self.fault(function, &error))
    }

    /// Calls a function that belongs to no request: its state is thrown away.
    ///
    /// # Errors
    /// As [`Program::call`].
    pub(super) fn call_once(
        &self,
        function: &str,
        arguments: impl FuncArgs,
        params: &Dynamic,
    ) -> Result<Dynamic, String> {
        self.call(function, arguments, Call { state: &mut Dynamic::from_map(Map::new()), params })
    }

    /// An error about a function as a whole, at the place where it begins: about what it gave, or about a limit, for which
    /// the engine tells no place.
    pub(super) fn wrong(&self, function: &str, message: impl fmt::Display) -> String {
        let name = function.split('(').next().unwrap_or(function);
        let place = self.defined.iter().find(|(defined, _)| defined == name).map_or(Position::NONE, |&(_, at)| at);
        if place.is_none() {
            return format!("{}: {function}: {message}", self.file);
        }
        placed(&self.file, format_args!("{function}: {message}"), place)
    }

    fn fault(&self, function: &str, error: &EvalAltResult) -> String {
        let inner = error.unwrap_inner();
        // The text of an error repeats the place at its end, and begins with a word that says nothing.
        let text = inner.to_string();
        let text = text.split(" (line ").next().unwrap_or(&text);
        let text = text.strip_prefix("Runtime error: ").unwrap_or(text);
        match [inner.position(), error.position()].into_iter().find(|at| !at.is_none()) {
            Some(at) => placed(&self.file, text, at),
            None => self.wrong(function, text),
        }
    }
}

/// Where a function begins, outside of comments that go to the end of a line; nowhere if it is not found.
fn place_of(source: &str, name: &str) -> Position {
    let defines = |text: &str| {
        let rest = text.strip_prefix("fn").filter(|rest| rest.starts_with(char::is_whitespace));
        let rest = rest.and_then(|rest| rest.trim_start().strip_prefix(name));
        rest.is_some_and(|rest| rest.trim_start().starts_with('('))
    };
    for (line, text) in source.lines().enumerate() {
        let code = text.split("//").next().unwrap_or(text);
        if let Some((at, _)) = code.match_indices("fn").find(|&(at, _)| defines(&code[at..])) {
            let number = |index: usize| u16::try_from(index + 1).unwrap_or(u16::MAX);
            return Position::new(number(line), number(code[..at].chars().count()));
        }
    }
    Position::NONE
}

fn placed(file: &str, message: impl fmt::Display, at: Position) -> String {
    let (line, column) = (at.line().unwrap_or(1), at.position().unwrap_or(1));
    format!("{file}:{line}:{column}: {message}")
}

fn engine() -> Engine {
    let mut engine = Engine::new_raw();
    StandardPackage::new().register_into_engine(&mut engine);
    // Functions as values could hold each other without end.
    engine.disable_symbol("eval").disable_symbol("Fn").disable_symbol("curry");
    engine
        .set_max_operations(OPERATIONS_MAX)
        .set_max_call_levels(CALL_DEPTH_MAX)
        .set_max_expr_depths(EXPRESSION_DEPTH_MAX, EXPRESSION_DEPTH_MAX)
        .set_max_string_size(STRING_BYTES_MAX)
        .set_max_array_size(ITEMS_MAX)
        .set_max_map_size(ITEMS_MAX)
        .set_allow_anonymous_fn(false)
        .set_max_variables(VARIABLES_MAX);
    engine.register_fn("params", |context: NativeCallContext| context.tag().cloned().unwrap_or(Dynamic::UNIT));
    view::register(&mut engine);
    engine
}
