//! What the parser gives to the evaluator.

use super::super::error::Location;

#[derive(Debug)]
pub(super) struct Statement {
    pub location: Location,
    pub kind: StatementKind,
}

#[derive(Debug)]
pub(super) enum StatementKind {
    Assign {
        name: String,
        value: Word,
    },
    AssignArray {
        name: String,
        items: Vec<(Location, Word)>,
    },
    /// `export NAME`: checks that the name is set.
    Export {
        name: String,
    },
    /// `: word…`
    Evaluate {
        words: Vec<Word>,
    },
}

/// Parts that are joined without separators.
#[derive(Debug, Default)]
pub(super) struct Word {
    pub parts: Vec<Part>,
}

#[derive(Debug)]
pub(super) enum Part {
    Literal(String),
    Variable {
        location: Location,
        name: String,
        operation: Option<Operation>,
    },
    Arithmetic(Box<Expression>),
    Date {
        location: Location,
        utc: bool,
        format: Word,
    },
}

#[derive(Debug)]
pub(super) struct Operation {
    pub kind: OperationKind,
    /// With `:` an empty value counts as unset.
    pub empty_is_unset: bool,
    pub word: Word,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperationKind {
    /// `-`
    Otherwise,
    /// `+`
    Alternative,
    /// `=`
    Assign,
    /// `?`
    Require,
}

#[derive(Debug)]
pub(super) struct Expression {
    pub location: Location,
    pub kind: ExpressionKind,
}

#[derive(Debug)]
pub(super) enum ExpressionKind {
    Number(i64),
    /// A bare name.
    Name(String),
    /// `$X`, `${X…}`: a text that must be a whole number.
    Text(Word),
    Unary(Unary, Box<Expression>),
    Binary(Binary, Box<Expression>, Box<Expression>),
    Choose(Box<Expression>, Box<Expression>, Box<Expression>),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Unary {
    Minus,
    Plus,
    Not,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    Or,
    And,
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
    Power,
}
