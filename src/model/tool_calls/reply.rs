//! A reply, piece by piece.

use super::{find_any, partial_suffix, Step, ToolCall, ToolCallFormat};
use serde_json::Value;
use std::sync::Arc;

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// Where a reply may hold reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// Nowhere: the model's template knows no `<think>`.
    None,
    /// It may begin with `<think>`.
    Possible,
    /// The prompt ended with `<think>`: the reply begins inside.
    Open,
}

/// A part of a reply, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Thoughts.
    Reasoning(String),
    /// Text.
    Text(String),
    /// A complete call.
    Call(ToolCall),
}

enum State {
    /// Nothing but white space so far; it may become `<think>`.
    Start,
    Reasoning,
    Text,
    /// The buffer begins with an opening mark.
    Call,
}

/// Cuts a reply into pieces; see the documentation of the module above. The pieces depend on the joined
/// text alone, not on how it was cut (neighbouring texts may arrive in several pieces).
pub struct ReplyParser {
    format: Option<Arc<dyn ToolCallFormat>>,
    tools: Vec<Value>,
    state: State,
    /// Text that is not released yet.
    buffer: String,
    /// In [`State::Call`] and [`State::Reasoning`]: bytes in which no closing mark was found.
    searched: usize,
    /// In [`State::Reasoning`]: the buffer begins with an opening mark (after white space), which is a call
    /// unless the thoughts are closed after it.
    held: bool,
    /// White space that comes next belongs to markup.
    skip_space: bool,
    /// Something was released since the state began.
    begun: bool,
    malformed: u32,
}

impl ReplyParser {
    /// A parser at the start of a reply. Without `format` (a request without tools) there are no calls.
    pub fn new(format: Option<Arc<dyn ToolCallFormat>>, tools: Vec<Value>, thinking: Thinking) -> Self {
        Self {
            format,
            tools,
            state: match thinking {
                Thinking::None => State::Text,
                Thinking::Possible => State::Start,
                Thinking::Open => State::Reasoning,
            },
            buffer: String::new(),
            searched: 0,
            held: false,
            skip_space: false,
            begun: false,
            malformed: 0,
        }
    }

    /// Calls so far that could not be read.
    pub fn malformed(&self) -> u32 {
        self.malformed
    }

    /// The text so far ends inside of reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Adds text; returns what became certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        self.advance(false)
    }

    /// The end of the reply.
    pub fn finish(&mut self) -> Vec<Piece> {
        self.advance(true)
    }

    fn openings(&self) -> &'static [&'static str] {
        self.format.as_ref().map_or(&[], |format| format.openings())
    }

    fn advance(&mut self, last: bool) -> Vec<Piece> {
        let mut out = Vec::new();
        while match self.state {
            State::Start => self.start(last),
            State::Reasoning => self.reasoning(last, &mut out),
            State::Text => self.text(last, &mut out),
            State::Call => self.call(last, &mut out),
        } {}
        out
    }

    fn enter(&mut self, state: State) -> bool {
        self.state = state;
        self.begun = false;
        self.searched = 0;
        self.held = false;
        true
    }

    fn start(&mut self, last: bool) -> bool {
        let text = self.buffer.trim_start();
        if text.starts_with(THINK) {
            let taken = self.buffer.len() - text.len() + THINK.len();
            self.buffer.drain(..taken);
            return self.enter(State::Reasoning);
        }
        if THINK.starts_with(text) && !last {
            return false;
        }
        self.enter(State::Text)
    }

    fn reasoning(&mut self, last: bool, out: &mut Vec<Piece>) -> bool {
        if !self.begun {
            let space = self.buffer.len() - self.buffer.trim_start().len();
            self.buffer.drain(..space);
        }
        let mut from = self.searched.saturating_sub(END_THINK.len() - 1);
        while !self.buffer.is_char_boundary(from) {
            from -= 1;
        }
        if let Some((at, mark)) = find_any(&self.buffer, from, &[END_THINK]) {
            self.think(at, out);
            self.buffer.drain(..at + mark.len());
            self.skip_space = true;
            return self.enter(State::Text);
        }
        if !self.held {
            let opening = find_any(&self.buffer, 0, self.openings());
            let marks: Vec<&str> = [END_THINK].iter().chain(self.openings()).copied().collect();
            let end = match opening {
                Some((at, _)) => at,
                None if last => self.buffer.len(),
                None => self.buffer.len() - partial_suffix(&self.buffer, &marks),
            };
            // White space is held back: at the end of the thoughts it belongs to the markup.
            let shown = self.think(end, out);
            self.buffer.drain(..shown);
            self.held = opening.is_some();
        }
        self.searched = self.buffer.len();
        if last && self.held {
            let space = self.buffer.len() - self.buffer.trim_start().len();
            self.buffer.drain(..space);
            self.skip_space = false;
            return self.enter(State::Text);
        }
        if last {
            self.buffer.clear();
        }
        false
    }

    /// Releases the thoughts up to byte `end` without the white space at their end; returns their bytes.
    fn think(&mut self, end: usize, out: &mut Vec<Piece>) -> usize {
        let shown = self.buffer[..end].trim_end().len();
        if shown > 0 {
            out.push(Piece::Reasoning(self.buffer[..shown].to_owned()));
            self.begun = true;
        }
        shown
    }

    fn text(&mut self, last: bool, out: &mut Vec<Piece>) -> bool {
        let found = find_any(&self.buffer, 0, self.openings());
        let end = match found {
            Some((at, _)) => at,
            None if last => self.buffer.len(),
            None => self.buffer.len() - partial_suffix(&self.buffer, self.openings()),
        };
        let mut from = 0;
        if self.skip_space {
            from = end - self.buffer[..end].trim_start().len();
        }
        if from < end {
            self.skip_space = false;
            out.push(Piece::Text(self.buffer[from..end].to_owned()));
        }
        self.buffer.drain(..end);
        found.is_some() && self.enter(State::Call)
    }

    fn call(&mut self, last: bool, out: &mut Vec<Piece>) -> bool {
        let Some(format) = self.format.clone() else {
            return self.enter(State::Text);
        };
        let closings = format.closings();
        let longest = closings.iter().map(|mark| mark.len()).max().unwrap_or(1);
        let mut from = self.searched.saturating_sub(longest - 1);
        while !self.buffer.is_char_boundary(from) {
            from -= 1;
        }
        if !last && find_any(&self.buffer, from, closings).is_none() {
            self.searched = self.buffer.len();
            return false;
        }
        match format.next(&self.buffer, last, &self.tools) {
            Step::More => {
                self.searched = self.buffer.len();
                return false;
            }
            Step::Call { len, call } => {
                out.push(Piece::Call(call));
                self.buffer.drain(..len);
                self.skip_space = true;
            }
            Step::Malformed { len } => {
                self.malformed += 1;
                out.push(Piece::Text(self.buffer[..len].to_owned()));
                self.buffer.drain(..len);
                self.skip_space = false;
            }
        }
        self.enter(State::Text)
    }
}
