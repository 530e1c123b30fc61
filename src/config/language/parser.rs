//! Statements and words.

use super::super::error::{LanguageError, Location};
use super::{arithmetic, ast::*, cursor::fail_at, cursor::Cursor, File};
use std::{path::PathBuf, sync::Arc};

/// Expansions inside expansions; deeper nesting is a mistake or an attack on the stack.
const MAX_DEPTH: u32 = 40;

/// Longest `{a,b}` list that is recognised.
const MAX_BRACE_LIST: usize = 256;

pub(super) struct Parser {
    pub(super) cursor: Cursor,
    pub(super) depth: u32,
    /// The first quote that spans lines and whose end looks like the start of another one.
    doubtful: Option<Doubtful>,
}

/// A quote that was probably left open.
struct Doubtful {
    open: Location,
    close: Location,
}

/// Where a word ends and what is special inside it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Context {
    /// At a blank, `;` or line end.
    Bare,
    /// At a blank, line end or `)`.
    Array,
    /// At `"`.
    Quoted,
    /// At `}`; quotes group.
    Brace,
    /// At `}`; inside double quotes, where single quotes are plain.
    QuotedBrace,
    /// At `)` of a command substitution, or a blank.
    Command,
}

type Parsed<T> = Result<T, LanguageError>;

impl Parser {
    pub(super) fn new(file: Arc<PathBuf>, text: &str) -> Self {
        Self {
            cursor: Cursor::new(file, text),
            depth: 0,
            doubtful: None,
        }
    }

    /// Parses the file. A forgotten closing quote makes the next opening quote end the text, and the
    /// mistake shows lines later; the error then names the quote that was left open.
    pub(super) fn file(mut self) -> Parsed<File> {
        match self.statements() {
            Ok(file) => Ok(file),
            Err(error) => match self.doubtful {
                Some(Doubtful { open, close }) if close <= error.location || open == error.location => {
                    let problem = format!(
                        "this quote ends only at line {}, column {}, and then: {} (line {}, column {})",
                        close.line, close.column, error.problem, error.location.line, error.location.column
                    );
                    fail_at(open, problem, "close the quote on its own line")
                }
                _ => Err(error),
            },
        }
    }

    fn statements(&mut self) -> Parsed<File> {
        let mut statements = Vec::new();
        loop {
            self.cursor.skip_blanks();
            match self.cursor.peek() {
                None => return Ok(File { statements }),
                Some('\n' | ';') => self.cursor.skip(1),
                Some('#') => self.cursor.skip_line(),
                Some(_) => self.statement(&mut statements)?,
            }
        }
    }

    fn statement(&mut self, out: &mut Vec<Statement>) -> Parsed<()> {
        let location = self.cursor.location();
        if self.cursor.peek() == Some(':') && self.cursor.peek_at(1).is_none_or(char::is_whitespace) {
            self.cursor.skip(1);
            let words = self.words_to_line_end()?;
            out.push(Statement {
                location,
                kind: StatementKind::Evaluate { words },
            });
            return Ok(());
        }
        let preview = self.cursor.preview();
        let name = self.cursor.name();
        if name == "export" && self.cursor.peek().is_some_and(|c| c == ' ' || c == '\t') {
            return self.export(out);
        }
        if name.is_empty() || !matches!(self.cursor.peek(), Some('=' | '+')) {
            if let Some(wrong) = wrong_name(&preview) {
                return fail_at(
                    location,
                    format!("`{wrong}` is not a variable name"),
                    "names are made of letters, digits and `_`, and do not start with a digit",
                );
            }
            return fail_at(
                location,
                format!("`{preview}` is not an assignment"),
                help_for_command(&preview),
            );
        }
        out.push(self.assignment(location, name)?);
        self.end_of_statement()
    }

    fn export(&mut self, out: &mut Vec<Statement>) -> Parsed<()> {
        loop {
            self.cursor.skip_blanks();
            if matches!(self.cursor.peek(), None | Some('\n' | ';' | '#')) {
                return self.end_of_statement();
            }
            let location = self.cursor.location();
            let preview = self.cursor.preview();
            let name = self.cursor.name();
            match self.cursor.peek() {
                Some('=' | '+') if !name.is_empty() => out.push(self.assignment(location, name)?),
                None | Some(' ' | '\t' | '\n' | ';' | '\\') if !name.is_empty() => out.push(Statement {
                    location,
                    kind: StatementKind::Export { name },
                }),
                _ => {
                    return fail_at(
                        location,
                        format!("`{preview}` cannot be exported"),
                        "write `export NAME=value`; options of export have no meaning here",
                    )
                }
            }
        }
    }

    /// From `=` on.
    fn assignment(&mut self, location: Location, name: String) -> Parsed<Statement> {
        if self.cursor.peek() == Some('+') {
            return self.cursor.fail(
                format!("`{name}+=` appends, which is not supported"),
                format!("write the whole value: {name}=…"),
            );
        }
        self.cursor.skip(1);
        let kind = if self.cursor.peek() == Some('(') {
            let items = self.array(&name)?;
            StatementKind::AssignArray { name, items }
        } else {
            let value = self.word(Context::Bare)?;
            StatementKind::Assign { name, value }
        };
        Ok(Statement { location, kind })
    }

    fn array(&mut self, name: &str) -> Parsed<Vec<(Location, Word)>> {
        let open = self.cursor.location();
        self.cursor.skip(1);
        let mut items = Vec::new();
        loop {
            self.cursor.skip_blanks();
            match self.cursor.peek() {
                None => {
                    return fail_at(
                        open,
                        format!("the array {name} has no closing `)`"),
                        format!("write {name}=( first second )"),
                    )
                }
                Some('\n') => self.cursor.skip(1),
                Some('#') => self.cursor.skip_line(),
                Some(')') => {
                    self.cursor.skip(1);
                    return Ok(items);
                }
                Some(_) => {
                    let location = self.cursor.location();
                    items.push((location, self.word(Context::Array)?));
                }
            }
        }
    }

    fn words_to_line_end(&mut self) -> Parsed<Vec<Word>> {
        let mut words = Vec::new();
        loop {
            self.cursor.skip_blanks();
            match self.cursor.peek() {
                None | Some('\n' | ';') => return Ok(words),
                Some('#') => self.cursor.skip_line(),
                Some(_) => words.push(self.word(Context::Bare)?),
            }
        }
    }

    fn end_of_statement(&mut self) -> Parsed<()> {
        self.cursor.skip_blanks();
        match self.cursor.peek() {
            None | Some('\n' | ';') => Ok(()),
            Some('#') => {
                self.cursor.skip_line();
                Ok(())
            }
            Some(_) => {
                let rest = self.cursor.preview();
                self.cursor.fail(
                    format!("`{rest}` follows the value on the same line"),
                    "put the value into quotes if it holds blanks, or start a new line",
                )
            }
        }
    }

    fn word(&mut self, context: Context) -> Parsed<Word> {
        let mut word = Word::default();
        let mut literal = String::new();
        let mut at_start = true;
        while let Some(c) = self.cursor.peek() {
            let bare = matches!(context, Context::Bare | Context::Array | Context::Command);
            match (c, context) {
                (' ' | '\t' | '\n', _) if bare => break,
                (';', Context::Bare) | (')', Context::Array | Context::Command) => break,
                ('"', Context::Quoted) | ('}', Context::Brace | Context::QuotedBrace) => break,
                ('\\', _) => self.escape(context, &mut literal),
                ('\'', Context::Quoted | Context::QuotedBrace) => self.take(&mut literal),
                ('\'', _) => self.single_quoted(&mut literal)?,
                ('"', _) => {
                    flush(&mut literal, &mut word);
                    let inner = self.double_quoted()?;
                    word.parts.extend(inner.parts);
                }
                ('`', _) => {
                    return self.cursor.fail(
                        "commands in back quotes are not run",
                        "write the value itself; `$(date +FORMAT)` is the one command",
                    )
                }
                ('$', _) => {
                    if let Some(part) = self.dollar(context, &mut literal)? {
                        flush(&mut literal, &mut word);
                        word.parts.push(part);
                    }
                }
                ('*' | '?' | '[', Context::Bare | Context::Array) => {
                    return self.cursor.fail(
                        format!("`{c}` outside quotes is a file pattern, and nothing is globbed"),
                        "put the value into quotes, or name the files",
                    )
                }
                ('~', Context::Bare | Context::Array) if at_start => {
                    return self.cursor.fail("`~` is not expanded", "write ${HOME}")
                }
                ('|' | '&' | '<' | '>' | '(' | ')', _) if bare => {
                    return self.cursor.fail(
                        format!("`{c}` outside quotes would run or redirect a command"),
                        "put the value into quotes",
                    )
                }
                ('“' | '”' | '„' | '‘' | '’', Context::Bare | Context::Array) if at_start => {
                    return self.cursor.fail(
                        format!("`{c}` is a typographic quote and does not quote"),
                        "write the plain \" or '",
                    )
                }
                (c, Context::Bare | Context::Array) if is_odd_blank(c) => {
                    return self.cursor.fail(
                        format!("a blank that is not an ordinary one (U+{:04X})", u32::from(c)),
                        "write ordinary blanks, or put the value into quotes",
                    )
                }
                ('{', Context::Array) if self.is_brace_list() => {
                    return self
                        .cursor
                        .fail("`{a,b}` lists are not expanded", "write every item")
                }
                _ => self.take(&mut literal),
            }
            at_start = false;
        }
        flush(&mut literal, &mut word);
        Ok(word)
    }

    fn take(&mut self, literal: &mut String) {
        literal.extend(self.cursor.next());
    }

    fn escape(&mut self, context: Context, literal: &mut String) {
        self.cursor.skip(1);
        let quoted = matches!(context, Context::Quoted | Context::QuotedBrace);
        match self.cursor.peek() {
            Some('\n') => self.cursor.skip(1),
            Some(c) if !quoted || matches!(c, '$' | '`' | '"' | '\\') => self.take(literal),
            Some('}') if context == Context::QuotedBrace => self.take(literal),
            _ => literal.push('\\'),
        }
    }

    fn single_quoted(&mut self, literal: &mut String) -> Parsed<()> {
        let open = self.cursor.location();
        self.cursor.skip(1);
        loop {
            let close = self.cursor.location();
            match self.cursor.next() {
                Some('\'') => {
                    self.note_quote(&open, close);
                    return Ok(());
                }
                Some(c) => literal.push(c),
                None => return fail_at(open, "this quote is never closed", "close it with another `'`"),
            }
        }
    }

    fn double_quoted(&mut self) -> Parsed<Word> {
        let open = self.cursor.location();
        self.cursor.skip(1);
        let mut word = match self.word(Context::Quoted) {
            // What is wrong on a later line is most often right there, and the quote was forgotten.
            Err(error) if error.location.line != open.line => {
                return fail_at(
                    open,
                    format!(
                        "this quote is still open in line {}, where {}",
                        error.location.line, error.problem
                    ),
                    format!("close it with another `\"`, or: {}", error.help),
                )
            }
            word => word?,
        };
        let close = self.cursor.location();
        if self.cursor.next().is_none() {
            return fail_at(open, "this quote is never closed", "close it with another `\"`");
        }
        self.note_quote(&open, close);
        // An empty pair of quotes is a part too: `X=""`.
        word.parts.push(Part::Literal(String::new()));
        Ok(word)
    }

    /// After a quote: what ends on another line, right after `=` or right before more text, was probably
    /// meant to end on its own.
    fn note_quote(&mut self, open: &Location, close: Location) {
        if open.line == close.line || self.doubtful.is_some() {
            return;
        }
        let before = self.cursor.before(2);
        let after = self.cursor.peek();
        let glued = after.is_some_and(|c| !c.is_whitespace() && !";)}".contains(c));
        if before == Some('=') || glued {
            self.doubtful = Some(Doubtful {
                open: open.clone(),
                close,
            });
        }
    }

    fn is_brace_list(&self) -> bool {
        let mut comma = false;
        for ahead in 1..MAX_BRACE_LIST {
            match self.cursor.peek_at(ahead) {
                Some(',') => comma = true,
                Some('}') => return comma,
                None | Some(' ' | '\t' | '\n' | ')' | '$') => return false,
                Some(_) => {}
            }
        }
        false
    }

    /// At `$`. `None` means that the dollar sign was plain and went to `literal`.
    fn dollar(&mut self, context: Context, literal: &mut String) -> Parsed<Option<Part>> {
        let location = self.cursor.location();
        let quoted = matches!(context, Context::Quoted | Context::QuotedBrace);
        match self.cursor.peek_at(1) {
            Some('{') => self.nested(location, |p, l| p.braces(l, quoted)).map(Some),
            Some('(') if self.cursor.peek_at(2) == Some('(') => {
                self.nested(location, |p, l| p.arithmetic(l)).map(Some)
            }
            Some('(') => self.nested(location, |p, l| p.command(l)).map(Some),
            Some(c) if c == '_' || c.is_ascii_alphabetic() => {
                self.cursor.skip(1);
                let name = self.cursor.name();
                Ok(Some(Part::Variable {
                    location,
                    name,
                    operation: None,
                }))
            }
            Some('\'' | '"') if !quoted => fail_at(
                location,
                "`$'…'` and `$\"…\"` are not supported",
                "use plain quotes; a line break may stand inside them as it is",
            ),
            Some(c) if c.is_ascii_digit() || "@*#?$!-".contains(c) => fail_at(
                location,
                format!("`${c}` has no meaning: a config has no arguments and runs no commands"),
                "write the value, or `\\$` for a dollar sign",
            ),
            _ => {
                self.take(literal);
                Ok(None)
            }
        }
    }

    fn nested(
        &mut self,
        location: Location,
        parse: impl FnOnce(&mut Self, Location) -> Parsed<Part>,
    ) -> Parsed<Part> {
        if self.depth >= MAX_DEPTH {
            return fail_at(
                location,
                format!("expansions are nested more than {MAX_DEPTH} deep"),
                "use a variable for the inner part",
            );
        }
        self.depth += 1;
        let part = parse(self, location);
        self.depth -= 1;
        part
    }

    /// At `${`.
    pub(super) fn braces(&mut self, location: Location, quoted: bool) -> Parsed<Part> {
        self.cursor.skip(2);
        let name = self.cursor.name();
        if name.is_empty() {
            let what = self.cursor.preview();
            return fail_at(
                location,
                format!("`${{{what}` is not a variable"),
                "write ${NAME}; lengths, indirect names and positions are not supported",
            );
        }
        let empty_is_unset = self.cursor.peek() == Some(':');
        let sign = self.cursor.peek_at(usize::from(empty_is_unset));
        let kind = match sign {
            Some('}') if !empty_is_unset => {
                self.cursor.skip(1);
                return Ok(Part::Variable {
                    location,
                    name,
                    operation: None,
                });
            }
            Some('-') => OperationKind::Otherwise,
            Some('+') => OperationKind::Alternative,
            Some('=') => OperationKind::Assign,
            Some('?') => OperationKind::Require,
            None => return fail_at(location, "this `${` is never closed", "close it with `}`"),
            Some(_) => {
                let what = self.cursor.preview();
                return self.cursor.fail(
                    format!("`${{{name}{what}` changes the text of a variable, which is not supported"),
                    "write the value itself; known forms are ${X} ${X:-d} ${X:=d} ${X:+a} ${X:?message}",
                );
            }
        };
        self.cursor.skip(1 + usize::from(empty_is_unset));
        let word = self.word(if quoted {
            Context::QuotedBrace
        } else {
            Context::Brace
        })?;
        if self.cursor.next().is_none() {
            return fail_at(location, "this `${` is never closed", "close it with `}`");
        }
        Ok(Part::Variable {
            location,
            name,
            operation: Some(Operation {
                kind,
                empty_is_unset,
                word,
            }),
        })
    }

    /// At `$((`.
    fn arithmetic(&mut self, location: Location) -> Parsed<Part> {
        self.cursor.skip(3);
        let expression = arithmetic::expression(self)?;
        arithmetic::skip_space(self);
        if !self.cursor.starts_with("))") {
            let rest = self.cursor.preview();
            let problem = if rest.is_empty() {
                "this `$((` is never closed".to_owned()
            } else {
                format!("`{rest}` cannot follow here in arithmetic")
            };
            let place = if rest.is_empty() {
                location
            } else {
                self.cursor.location()
            };
            return fail_at(
                place,
                problem,
                "write whole numbers, names, + - * / % ** and parentheses, then `))`",
            );
        }
        self.cursor.skip(2);
        Ok(Part::Arithmetic(Box::new(expression)))
    }

    /// At `$(`.
    fn command(&mut self, location: Location) -> Parsed<Part> {
        const HELP: &str =
            "write the value itself; the one command is $(date +FORMAT), for example $(date +%Y%m%d-%H%M%S)";
        self.cursor.skip(2);
        self.cursor.skip_blanks();
        let shown = self.cursor.preview();
        if self.cursor.name() != "date" || !matches!(self.cursor.peek(), Some(' ' | '\t' | ')')) {
            return fail_at(
                location,
                format!(
                    "the command `{}` is not run",
                    shown.split([')', '"']).next().unwrap_or_default()
                ),
                HELP,
            );
        }
        self.cursor.skip_blanks();
        let flag = ["-u ", "--utc "]
            .into_iter()
            .find(|flag| self.cursor.starts_with(flag));
        let utc = flag.is_some();
        if let Some(flag) = flag {
            self.cursor.skip(flag.len());
            self.cursor.skip_blanks();
        }
        let format = self.word(Context::Command)?;
        self.cursor.skip_blanks();
        let starts_with_plus =
            matches!(format.parts.first(), Some(Part::Literal(text)) if text.starts_with('+'));
        if !starts_with_plus || self.cursor.peek() != Some(')') {
            return fail_at(location, "this form of `date` is not supported", HELP);
        }
        self.cursor.skip(1);
        Ok(Part::Date {
            location,
            utc,
            format,
        })
    }
}

fn flush(literal: &mut String, word: &mut Word) {
    if !literal.is_empty() {
        word.parts.push(Part::Literal(std::mem::take(literal)));
    }
}

/// The part before `=` where it was meant as a name and is none.
fn wrong_name(text: &str) -> Option<&str> {
    let (name, _) = text.split_once('=')?;
    let like_a_name = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    let is_name = name.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
        && name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
    (!name.is_empty() && !is_name && name.chars().all(like_a_name)).then_some(name)
}

/// Blanks that come with text from web pages and look like ordinary ones.
fn is_odd_blank(c: char) -> bool {
    (c.is_whitespace() && !" \t\n\r".contains(c))
        || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}')
}

fn help_for_command(text: &str) -> &'static str {
    let first: String = text
        .chars()
        .take_while(|c| !matches!(c, ';' | '(' | ')'))
        .collect();
    match first.as_str() {
        "if" | "then" | "else" | "elif" | "fi" | "[" | "[[" | "test" | "case" | "esac" => {
            "conditions are not supported: use ${X:-default} or ${X:+value}, or one template module per case"
        }
        "for" | "while" | "until" | "do" | "done" | "function" => {
            "loops and functions are not supported: write every value"
        }
        "source" | "." => "name the file in TEMPLATE_MODULES=( … )",
        "set" | "shopt" | "trap" | "unset" | "umask" | "ulimit" => {
            "remove this line: nothing is executed here"
        }
        "declare" | "typeset" | "local" | "readonly" => "write NAME=value",
        _ => "write NAME=value, without blanks around `=`; a comment starts with `#`",
    }
}
