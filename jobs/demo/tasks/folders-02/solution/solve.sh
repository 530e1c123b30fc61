#!/bin/bash
set -e
cd /app
mkdir lemon thistle
